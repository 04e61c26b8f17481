"""`HTTPChannel` against a real HTTP server: what is sent, what counts as success, and what an error says."""

from __future__ import annotations

import asyncio
import base64
import logging
import pickle
import socket
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from ray_weightsync.errors import ConfigError, UnsupportedError
from ray_weightsync.protocol import channel as verbs
from ray_weightsync.protocol import http_routes
from ray_weightsync.protocol.channel import Channel
from ray_weightsync.protocol.http_channel import HTTPCallError, HTTPChannel
from ray_weightsync.protocol.reading import died, words

WORKER = (
    "Call to collective_rpc method failed: Worker failed with error 'unknown op', please check the stack trace above for the root cause"
)


def call(server: Any, verb: str, *args: Any, **kwargs: Any) -> Any:
    return asyncio.run(HTTPChannel(server.url).call(verb, *args, **kwargs))


def failure(server: Any, verb: str, *args: Any, **kwargs: Any) -> HTTPCallError:
    with pytest.raises(HTTPCallError) as raised:
        call(server, verb, *args, **kwargs)
    return raised.value


class TestVerbs:
    @pytest.mark.parametrize(
        ("verb", "args", "kwargs", "route", "query", "body", "answer"),
        [
            (verbs.INIT, ({"a": 1},), {}, "POST /init_weight_transfer_engine", {}, {"init_info": {"a": 1}}, None),
            (verbs.START, (), {}, "POST /start_weight_update", {}, None, None),
            (verbs.START_DRAFT, (), {}, "POST /start_draft_weight_update", {}, None, None),
            (verbs.UPDATE, ([{"a": 1}, {"b": (2,)}],), {}, "POST /update_weights", {}, {"update_info": [{"a": 1}, {"b": [2]}]}, None),
            (verbs.FINISH, (), {}, "POST /finish_weight_update", {}, None, None),
            (verbs.FINISH, ("v1",), {}, "POST /finish_weight_update", {}, {"weight_version": "v1"}, None),
            (verbs.SHUTDOWN, (), {}, "POST /shutdown_weight_transfer_engine", {}, None, None),
            (verbs.PAUSE, (), {"mode": "keep", "clear_cache": False}, "POST /pause", {"mode": "keep", "clear_cache": "false"}, None, None),
            (verbs.RESUME, (), {}, "POST /resume", {}, None, None),
            (verbs.IS_PAUSED, (), {}, "GET /is_paused", {}, None, False),
            (verbs.GET_VERSION, (), {}, "GET /weight_info", {}, None, "default"),
            (verbs.SET_VERSION, ("v2",), {}, "POST /update_weight_version", {}, {"new_version": "v2"}, None),
            (verbs.WORLD_SIZE, (), {}, "GET /get_world_size", {"include_dp": "true"}, None, 2),
            (
                verbs.RESET_PREFIX_CACHE,
                (),
                {"reset_running_requests": True},
                "POST /reset_prefix_cache",
                {"reset_running_requests": "true", "reset_external": "false"},
                None,
                True,
            ),
            (
                verbs.COLLECTIVE_RPC,
                ("rws_describe",),
                {"args": ("nonce",)},
                "POST /collective_rpc",
                {},
                {"method": "rws_describe", "args": ["nonce"], "kwargs": {}},
                [{"rank": 0}, None, "7"],
            ),
            (http_routes.WEIGHT_INFO, (), {}, "GET /weight_info", {}, None, {"weight_version": "default"}),
            (verbs.RESET_MM_CACHE, (), {}, "POST /reset_mm_cache", {}, None, None),
            (verbs.RESET_ENCODER_CACHE, (), {}, "POST /reset_encoder_cache", {}, None, None),
            (verbs.SLEEP, (2,), {}, "POST /sleep", {"level": "2"}, None, "sleeping"),
            (verbs.WAKE_UP, (None,), {}, "POST /wake_up", {}, None, "awake"),
            (verbs.WAKE_UP, (["weights"],), {}, "POST /wake_up", {"tags": "weights"}, None, "awake"),
        ],
    )
    def test_each_verb_is_sent_the_way_vllm_has_it(
        self, server: Any, verb: str, args: Any, kwargs: Any, route: str, query: Any, body: Any, answer: Any
    ) -> None:
        assert call(server, verb, *args, **kwargs) == answer
        (request,) = server.requests
        assert (request.route, request.query, request.body) == (route, query, body)
        assert "Authorization" not in request.headers

    def test_the_servers_configuration_is_asked_for_as_json(self, server: Any) -> None:
        assert call(server, http_routes.SERVER_INFO)["vllm_config"] == {"instance_id": "abc"}
        assert server.requests[0].query == {"config_format": "json"}

    def test_every_verb_of_the_table_has_a_route_and_others_are_unsupported(self, server: Any) -> None:
        channel = HTTPChannel(server.url)
        assert isinstance(channel, Channel)
        assert all(channel.supports(verb) for verb in verbs.KNOWN_VERBS)
        assert not channel.supports("generate")
        with pytest.raises(UnsupportedError, match="cannot do generate"):
            call(server, "generate")

    def test_a_label_that_a_server_does_not_have_is_none_and_not_default(self, server: Any, answer: Any) -> None:
        server.script["GET /weight_info"] = answer({"weight_version": None})
        assert call(server, verbs.GET_VERSION) is None

    def test_before_0_32_sleeping_and_waking_have_an_empty_answer(self, server: Any, answer: Any) -> None:
        server.script |= {"POST /sleep": answer(None), "POST /wake_up": answer(None)}
        assert call(server, verbs.SLEEP, 1) is None
        assert call(server, verbs.WAKE_UP, ["weights", "kv_cache"]) is None

    def test_a_path_prefix_is_kept(self, server: Any) -> None:
        asyncio.run(HTTPChannel(server.url + "//prefix/").call(verbs.START))
        assert server.routes == ["POST /prefix/start_weight_update"]

    def test_bad_payloads_and_arguments_fail_before_anything_is_sent(self, server: Any) -> None:
        with pytest.raises(TypeError, match=r"update_info\['a'\] is bytes"):
            call(server, verbs.UPDATE, {"a": b""})
        with pytest.raises(TypeError, match="nan"):
            call(server, verbs.INIT, {"a": float("nan")})
        with pytest.raises(ConfigError, match="mode must be one of"):
            call(server, verbs.PAUSE, mode="kill")
        with pytest.raises(ConfigError, match="out of step"):
            call(server, verbs.COLLECTIVE_RPC, "m", 5.0)
        assert server.requests == []


class TestAnswers:
    @pytest.mark.parametrize(
        ("verb", "args", "route", "wrong"),
        [
            (verbs.START, (), "POST /start_weight_update", b"<html><body>Welcome</body></html>"),
            (verbs.START, (), "POST /start_weight_update", None),
            (verbs.START, (), "POST /start_weight_update", {"ok": True}),
            (verbs.START, (), "POST /start_weight_update", ["message"]),
            (verbs.PAUSE, (), "POST /pause", {"status": "pausing"}),
            (verbs.RESUME, (), "POST /resume", {"status": "paused"}),
            (verbs.IS_PAUSED, (), "GET /is_paused", {"is_paused": "no"}),
            (verbs.GET_VERSION, (), "GET /weight_info", {}),
            (verbs.GET_VERSION, (), "GET /weight_info", {"weight_version": 3}),
            (verbs.SET_VERSION, ("v1",), "POST /update_weight_version", {"success": False, "new_version": "v1"}),
            (verbs.SET_VERSION, ("v1",), "POST /update_weight_version", {"success": True, "new_version": "v0"}),
            (verbs.WORLD_SIZE, (), "GET /get_world_size", {"world_size": True}),
            (verbs.RESET_PREFIX_CACHE, (), "POST /reset_prefix_cache", None),
            (verbs.COLLECTIVE_RPC, ("m",), "POST /collective_rpc", {"results": {}}),
            (verbs.RESET_MM_CACHE, (), "POST /reset_mm_cache", b"<html>"),
            (http_routes.SERVER_INFO, (), "GET /server_info", {"vllm_config": "a text"}),
        ],
    )
    def test_a_200_that_is_not_the_answer_expected_is_an_error(
        self, server: Any, answer: Any, verb: str, args: Any, route: str, wrong: Any
    ) -> None:
        server.script[route] = answer(wrong)
        error = failure(server, verb, *args)
        assert error.status == 200
        assert error.may_have_run
        assert "not the answer expected" in str(error)
        assert server.url in str(error)

    def test_an_html_page_is_shown_shortened_with_its_type(self, server: Any, answer: Any) -> None:
        server.script["POST /start_weight_update"] = answer(b"<html>" + b"x" * 5000, headers={"Content-Type": "text/html"})
        said = str(failure(server, verbs.START))
        assert "text/html: <html>xxx" in said
        assert len(said) < 800

    @pytest.mark.parametrize(
        ("status", "body", "says"),
        [
            (500, {"error": {"message": "shape mismatch in q_proj", "type": "InternalServerError"}}, "500 .*: shape mismatch in q_proj"),
            (500, {"error": {"message": WORKER}}, "500 Internal Server Error: unknown op$"),
            (500, {"error": "Failed to pause generation: x"}, "500 .*: Failed to pause generation: x"),
            (401, {"error": "Unauthorized"}, r"401 Unauthorized \(no api_key was given\)"),
            (403, {"detail": "Forbidden for you"}, r"403 .*: Forbidden for you \(no api_key was given\)"),
            (404, {"detail": "Not Found"}, r"404 Not Found \(is VLLM_SERVER_DEV_MODE=1"),
            (422, {"detail": [{"loc": ["body", "update_info"], "msg": "Field required"}]}, r"422 .*: body\.update_info: Field required"),
            (503, b"upstream connect error", "503 .*: upstream connect error"),
            (503, None, "503 .*: no words"),
            (201, {"message": "created"}, "201"),
        ],
    )
    def test_any_other_status_is_an_error_with_url_status_and_the_servers_words(
        self, server: Any, answer: Any, status: int, body: Any, says: str
    ) -> None:
        server.script["POST /update_weights"] = answer(body, status)
        error = failure(server, verbs.UPDATE, {})
        assert error.status == status
        with pytest.raises(HTTPCallError, match=says):
            raise error
        assert f"POST {server.url}/update_weights" in words(error)
        assert not died(error)
        assert server.routes == ["POST /update_weights"]  # a POST is not repeated
        assert str(pickle.loads(pickle.dumps(error))) == str(error)

    @pytest.mark.parametrize("body", [{"detail": "Not Found"}, {"error": {"message": "Not Found"}}])
    def test_a_missing_optional_route_is_unsupported_and_asks_for_dev_mode(self, server: Any, answer: Any, body: Any) -> None:
        server.script["POST /shutdown_weight_transfer_engine"] = answer(body, 404)
        with pytest.raises(UnsupportedError, match=r"vLLM has it since 0\.30(.|\n)*VLLM_SERVER_DEV_MODE=1"):
            call(server, verbs.SHUTDOWN)

    def test_a_404_of_something_else_than_vllm_says_nothing_about_the_version(self, server: Any, answer: Any) -> None:
        server.script["POST /pause"] = answer(b"<h1>no such tenant</h1>", 404)
        assert "no such tenant" in str(failure(server, verbs.PAUSE))

    @pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
    def test_a_redirect_is_refused_and_not_followed(self, server: Any, answer: Any, status: int) -> None:
        server.script["POST /start_weight_update"] = answer(None, status, {"Location": server.url + "/elsewhere"})
        error = failure(server, verbs.START)
        assert server.routes == ["POST /start_weight_update"]
        assert "redirects are refused" in str(error)
        assert "/elsewhere" in str(error)
        assert not error.may_have_run


class TestConnections:
    def test_a_post_whose_connection_breaks_after_it_was_carried_out_is_not_repeated(self, server: Any, answer: Any) -> None:
        server.script["POST /start_weight_update"] = answer(broken=True)
        error = failure(server, verbs.START)
        assert server.routes == ["POST /start_weight_update"]
        assert error.may_have_run
        assert "may have carried the call out" in str(error)

    def test_a_read_is_tried_again(self, server: Any, answer: Any) -> None:
        server.script["GET /is_paused"] = [answer(broken=True), answer(b"busy", 503), answer({"is_paused": True})]
        assert call(server, verbs.IS_PAUSED) is True
        assert len(server.requests) == 3

    def test_a_read_that_never_succeeds_says_why(self, server: Any, answer: Any) -> None:
        server.script["GET /is_paused"] = answer(b"still busy", 503)
        assert "still busy" in str(failure(server, verbs.IS_PAUSED))
        assert len(server.requests) == 3

    def test_a_read_that_was_refused_is_not_tried_again(self, server: Any, answer: Any) -> None:
        server.script["GET /is_paused"] = answer({"error": "Unauthorized"}, 401)
        failure(server, verbs.IS_PAUSED)
        assert len(server.requests) == 1

    def test_where_nobody_listens_nothing_was_sent_and_nobody_died(self) -> None:
        with socket.socket() as taken:  # bound, not listening: nobody else can take the port meanwhile
            taken.bind(("127.0.0.1", 0))
            channel = HTTPChannel(f"http://127.0.0.1:{taken.getsockname()[1]}")
            with pytest.raises(HTTPCallError, match="no connection, nothing was sent") as raised:
                asyncio.run(channel.call(verbs.START))
        assert not raised.value.may_have_run
        assert raised.value.status is None
        assert not died(raised.value)

    def test_proxies_and_netrc_of_the_environment_are_not_used_for_this_machine(
        self, server: Any, new_server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
    ) -> None:
        proxy = new_server()
        (tmp_path / "netrc").write_text("machine 127.0.0.1 login user password hunter2\n")
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        call(server, verbs.START)
        assert proxy.requests == []
        assert "Authorization" not in server.requests[0].headers

    def test_a_proxy_of_the_environment_is_used_for_another_host_but_no_netrc(
        self, new_server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
    ) -> None:
        proxy = new_server()
        (tmp_path / "netrc").write_text("machine engine.invalid login user password hunter2\n")
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        monkeypatch.setenv("http_proxy", proxy.url)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        asyncio.run(HTTPChannel("http://engine.invalid:8000").call(verbs.START))
        assert proxy.requests[0].headers["Host"] == "engine.invalid:8000"
        assert "Authorization" not in proxy.requests[0].headers

    def test_a_server_that_never_answers_does_not_keep_the_process_alive(self) -> None:
        program = textwrap.dedent("""
            import asyncio, socket
            from ray_weightsync.protocol.http_channel import HTTPChannel
            silent, kept = socket.create_server(("127.0.0.1", 0)), []
            async def main():
                call = asyncio.create_task(HTTPChannel(f"http://127.0.0.1:{silent.getsockname()[1]}").call("start_weight_update"))
                kept.append(await asyncio.get_running_loop().run_in_executor(None, silent.accept))  # open, and silent
                call.cancel()
            asyncio.run(main())
        """)
        done = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


class TestSecrets:
    def test_the_token_is_sent_and_shown_nowhere(self, server: Any, answer: Any, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG)
        channel = HTTPChannel(server.url, api_key="hunter2")
        server.script["POST /start_weight_update"] = answer({"error": {"message": "bad token hunter2"}}, 401)
        server.script["POST /resume"] = answer(None, 302, {"Location": "http://h/?token=hunter2"})
        server.script["GET /is_paused"] = answer(broken=True)
        said = [repr(channel)]
        for verb in (verbs.START, verbs.RESUME, verbs.IS_PAUSED):
            with pytest.raises(HTTPCallError) as raised:
                asyncio.run(channel.call(verb))
            said += [str(raised.value), repr(raised.value)]
        assert server.requests[0].headers["Authorization"] == "Bearer hunter2"
        assert "hunter2" not in " ".join([*said, caplog.text])
        assert "bad token ***" in said[1]
        assert "the api_key given was not accepted" in said[1]

    def test_a_token_itself_keeps_the_channel_in_its_process(self) -> None:
        with pytest.raises(ConfigError, match="does not leave its process"):
            pickle.dumps(HTTPChannel("https://h", api_key="hunter2"))

    def test_the_name_of_a_variable_travels_and_its_token_is_sent(self, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RWS_TEST_KEY", "hunter2")
        pickled = pickle.dumps(HTTPChannel(server.url, api_key="env:RWS_TEST_KEY", label="e0"))
        assert b"hunter2" not in pickled
        channel = pickle.loads(pickled)
        asyncio.run(channel.call(verbs.START))
        assert channel.label == "e0"
        assert server.requests[0].headers["Authorization"] == "Bearer hunter2"

    def test_a_variable_that_is_not_set_is_told_when_the_channel_is_made(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("RWS_TEST_KEY", raising=False)
        with pytest.raises(ConfigError, match="RWS_TEST_KEY"):
            HTTPChannel("https://h", api_key="env:RWS_TEST_KEY")

    def test_plain_http_to_another_host_warns_in_words_and_this_machine_does_not(self, caplog: pytest.LogCaptureFixture) -> None:
        HTTPChannel("http://127.0.0.1:8000")
        HTTPChannel("https://10.0.0.1")
        assert caplog.text == ""
        HTTPChannel("http://10.0.0.1:8000", api_key="hunter2")
        assert "vLLM does not check its --api-key on the weight routes" in caplog.text
        assert "travels unencrypted" in caplog.text
        assert "hunter2" not in caplog.text


class Exploding:
    """Would run code wherever its pickle is loaded."""

    loaded = 0

    def __reduce__(self) -> Any:
        return (_explode, ())


def _explode() -> str:
    Exploding.loaded += 1
    return "loaded"


HANDLES = [{"GPU-1": ("rebuild", (1, 2))}]


class TestPickledHandles:
    @pytest.mark.parametrize(
        "update", [{"ipc_handles": HANDLES}, [{"names": []}, {"ipc_handles": HANDLES}], {"ipc_handles_pickled": "gASV"}]
    )
    def test_they_are_refused_unless_allowed_and_the_error_says_what_that_means(self, server: Any, update: Any) -> None:
        with pytest.raises(ConfigError, match=r"vLLM loads .*VLLM_ALLOW_INSECURE_SERIALIZATION=1.*allow_pickle=True"):
            call(server, verbs.UPDATE, update)
        assert server.requests == []

    def test_allowed_they_travel_as_base64_of_a_pickle_and_the_callers_dict_is_not_modified(self, server: Any) -> None:
        channel = HTTPChannel(server.url, allow_pickle=True)
        one = {"names": ["a"], "shapes": [(2,)], "ipc_handles": HANDLES[0]}
        several = [{"names": ["a"], "ipc_handles": HANDLES}, {"names": ["b"]}]
        for update in (one, several):
            asyncio.run(channel.call(verbs.UPDATE, update))
        assert one == {"names": ["a"], "shapes": [(2,)], "ipc_handles": HANDLES[0]}
        assert several == [{"names": ["a"], "ipc_handles": HANDLES}, {"names": ["b"]}]
        first, second = (request.body["update_info"] for request in server.requests)
        assert sorted(first) == ["ipc_handles_pickled", "names", "shapes"]
        assert pickle.loads(base64.b64decode(first["ipc_handles_pickled"])) == HANDLES[0]
        assert pickle.loads(base64.b64decode(second[0]["ipc_handles_pickled"])) == HANDLES
        assert second[1] == {"names": ["b"]}

    def test_an_update_without_handles_passes_unchanged(self, server: Any) -> None:
        call(server, verbs.UPDATE, {"names": ["a"], "ipc_handles": None, "ipc_handles_pickled": None})
        assert server.requests[0].body["update_info"] == {"names": ["a"], "ipc_handles": None, "ipc_handles_pickled": None}

    def test_over_plain_http_to_another_host_they_need_a_second_yes(self) -> None:
        update = {"ipc_handles": HANDLES}
        with pytest.raises(ConfigError, match="can be replaced on its way"):
            HTTPChannel("http://10.0.0.1:8000", allow_pickle=True).prepared(verbs.UPDATE, update)
        for channel in (HTTPChannel("http://10.0.0.1:8000", allow_pickle="plain-http"), HTTPChannel("https://10.0.0.1", allow_pickle=True)):
            body = channel.prepared(verbs.UPDATE, update).body
            assert body is not None
            assert "ipc_handles_pickled" in body["update_info"]

    def test_what_a_server_sends_is_never_unpickled(self, server: Any, answer: Any) -> None:
        server.script["POST /start_weight_update"] = answer(pickle.dumps(Exploding()))
        failure(server, verbs.START)
        assert Exploding.loaded == 0


@pytest.mark.parametrize("arguments", [{"verify": ""}, {"verify": None}, {"allow_pickle": "yes"}, {"api_key": ""}])
def test_wrong_arguments_are_refused_when_given(arguments: Any) -> None:
    with pytest.raises(ConfigError):
        HTTPChannel("http://127.0.0.1", **arguments)
