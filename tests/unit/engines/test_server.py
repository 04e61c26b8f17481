"""A vLLM server that is attached: a small stand-in with vLLM's routes and answers."""

from __future__ import annotations

import asyncio
import itertools
import json
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from ray_weightsync.engines.ref import EngineRef, as_refs
from ray_weightsync.engines.resolve import inspect, resolve, resolve_all
from ray_weightsync.engines.vllm_args import WORKER_EXTENSION
from ray_weightsync.errors import AttachError, EngineCallError
from ray_weightsync.worker.identity import package_version

LIMIT_S = 20.0


class Server:
    """What one vLLM server answers. Change the attributes to make it another."""

    def __init__(self, instance: str = "i-1", *, ranks: int = 2, backend: str | None = "rws", extension: str = WORKER_EXTENSION) -> None:
        self.instance, self.ranks, self.backend, self.extension = instance, ranks, backend, extension
        self.missing: set[str] = set()
        self.asked: list[str] = []
        self.tokens: list[str | None] = []
        self.parallel: dict[str, Any] = {}
        self.describe: Callable[[str], Any] = lambda nonce: [self.worker(rank, nonce) for rank in range(self.ranks)]

    def worker(self, rank: int, nonce: str) -> dict[str, Any]:
        return {
            "nonce": nonce,
            "rank": rank,
            "world_size": self.ranks,
            "package_version": package_version(),
            "incarnation": f"{self.instance}-{rank}",
        }

    def answer(self, route: str, body: dict[str, Any]) -> tuple[int, Any]:
        self.asked.append(route)
        if route in self.missing:
            return 404, {"detail": "Not Found"}
        if route == "server_info":
            parallel = {
                "tensor_parallel_size": self.ranks,
                "pipeline_parallel_size": 1,
                "data_parallel_size": 1,
                "worker_extension_cls": self.extension,
                **self.parallel,
            }
            transfer = {"backend": self.backend} if self.backend else None
            config = {
                "instance_id": self.instance,
                "parallel_config": parallel,
                "weight_transfer_config": transfer,
                "kv_transfer_config": None,
            }
            return 200, {"vllm_config": config, "vllm_env": {}, "system_env": {"vllm_version": "0.32.0"}}
        if route == "collective_rpc":
            assert body["method"] == "rws_describe"
            assert body.get("timeout") is None
            results = self.describe(body["args"][0])
            return (500, {"error": {"message": results}}) if isinstance(results, str) else (200, {"results": results})
        known = {
            "is_paused": {"is_paused": True},
            "weight_info": {"weight_version": "default"},
            "get_world_size": {"world_size": self.ranks},
        }
        return (200, known[route]) if route in known else (404, {"detail": "Not Found"})


@contextmanager
def serving(*servers: Server) -> Iterator[str]:
    """A URL behind which the servers answer in turn, as behind a router."""
    turns = itertools.cycle(servers)

    class Handler(BaseHTTPRequestHandler):
        def reply(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else {}
            server = next(turns)
            server.tokens.append(self.headers.get("Authorization"))
            status, answer = server.answer(self.path.lstrip("/").partition("?")[0], body)
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = reply

        def log_message(self, format: str, *args: Any) -> None: ...

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}"
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def attached(url: str, **fields: Any) -> Any:
    return asyncio.run(resolve(EngineRef(url, **fields), limit_s=LIMIT_S))


def test_a_server_tells_what_it_is() -> None:
    with serving(Server()) as url:
        facts = attached(url).facts
    assert (facts.kind, facts.world_size, facts.tensor_parallel_size, facts.incarnation) == ("http", 2, 2, "i-1")
    assert (facts.backend, facts.version, facts.paused, facts.vllm_version) == ("rws", "default", True, "0.32.0")
    assert [worker.rank for worker in facts.workers] == [0, 1]


def test_a_server_of_one_data_parallel_rank_is_refused_with_what_to_start_instead() -> None:
    server = Server()
    server.parallel = {"data_parallel_size": 2, "data_parallel_index": 1, "data_parallel_external_lb": True}
    with serving(server) as url, pytest.raises(AttachError, match="external or hybrid load balancing") as raised:
        attached(url)
    assert "attach that one" in str(raised.value)


def test_a_server_is_believed_about_its_workers_and_another_number_is_an_error_with_both() -> None:
    with serving(Server(ranks=2)) as url:
        assert attached(url, world_size=2).world_size == 2
        with pytest.raises(AttachError, match=r"it has 2 workers .*EngineRef\(world_size=4\) was given"):
            attached(url, world_size=4)


def test_a_router_is_refused_because_reads_of_its_identity_differ() -> None:
    with serving(Server("i-1"), Server("i-2")) as url, pytest.raises(AttachError, match="is not one server") as raised:
        attached(url, id="gen")
    assert raised.value.replicas == ("gen",)
    assert "i-1, i-2" in str(raised.value)


def test_a_router_over_servers_without_our_workers_is_refused_by_its_identity() -> None:
    servers = [Server(name, backend=None) for name in ("i-1", "i-2")]
    with serving(*servers) as url, pytest.raises(AttachError, match="is not one server: 4 reads of its identity gave i-1, i-2") as raised:
        attached(url)
    assert "each with its own URL" in str(raised.value)


def test_the_same_server_under_two_urls_is_refused() -> None:
    with serving(Server()) as url, pytest.raises(AttachError, match="are the same engine") as raised:
        asyncio.run(resolve_all(as_refs([url, url.replace("127.0.0.1", "localhost")]), limit_s=LIMIT_S))
    assert raised.value.replicas == ("r0", "r1")


def test_two_servers_are_two() -> None:
    with serving(Server("i-1")) as one, serving(Server("i-2")) as two:
        engines = asyncio.run(resolve_all(as_refs([one, two]), limit_s=LIMIT_S))
    assert [engine.id for engine in engines] == ["r0", "r1"]


@pytest.mark.parametrize("server", [Server(extension=""), Server(backend=None)])
def test_a_server_that_may_lack_our_method_is_never_asked_for_it(server: Server) -> None:
    with serving(server) as url, pytest.raises(AttachError, match="vllm_engine_args"):
        attached(url)
    assert "collective_rpc" not in server.asked


def test_a_server_on_vllms_own_backend_is_known_by_it_and_never_asked_for_our_method() -> None:
    server = Server(backend="nccl")
    with serving(server) as url:
        found = attached(url)
    assert found.facts.is_stock
    assert "collective_rpc" not in server.asked


def test_a_server_out_of_step_is_refused_and_said_to_be_replaced() -> None:
    server = Server()
    server.describe = lambda nonce: [server.worker(0, nonce), server.worker(1, "older")]
    with serving(server) as url, pytest.raises(AttachError, match="out of step") as raised:
        attached(url)
    assert "start a new engine in its place" in str(raised.value)


def test_an_old_error_that_comes_back_from_the_workers_means_out_of_step() -> None:
    server = Server()
    with serving(server) as url:
        engine = attached(url)
        server.describe = lambda nonce: "rank 1: an error of an earlier call"
        facts = asyncio.run(inspect(engine, "n", limit_s=LIMIT_S))
    assert not facts.in_step
    assert "an error of an earlier call" in str(facts.step_problem)


def test_a_server_without_the_version_route_has_an_unknown_version() -> None:
    server = Server()
    server.missing = {"weight_info", "is_paused"}
    with serving(server) as url:
        facts = attached(url).facts
    assert (facts.version, facts.paused) == (None, None)


def test_a_server_without_dev_mode_is_refused_with_the_setting_to_look_at() -> None:
    server = Server()
    server.missing = {"server_info"}
    with serving(server) as url, pytest.raises(AttachError, match="VLLM_SERVER_DEV_MODE=1"):
        attached(url)


def test_a_restarted_server_behind_the_same_url_is_another_incarnation() -> None:
    server = Server("i-1")
    with serving(server) as url:
        engine = attached(url)
        server.instance = "i-2"
        facts = asyncio.run(inspect(engine, "n", limit_s=LIMIT_S))
    assert facts.incarnation != engine.facts.incarnation


def test_nobody_listening_is_an_error_that_names_engine_and_url() -> None:
    with serving(Server()) as url:
        engine = attached(url, id="gen")
    with pytest.raises(AttachError, match=rf"(?s)gen \({url}\).*give the root of a vLLM server, without /v1"):
        attached(url, id="gen")
    with pytest.raises(EngineCallError) as raised:
        asyncio.run(inspect(engine, "n", limit_s=LIMIT_S))
    assert raised.value.failures["gen"].kind == "raised"


def test_an_api_key_is_read_from_the_environment_of_the_process_that_attaches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RWS_TEST_KEY", "s3cret")
    server = Server()
    with serving(server) as url:
        attached(url, api_key="env:RWS_TEST_KEY")
    assert set(server.tokens) == {"Bearer s3cret"}


def test_a_token_given_itself_is_sent_with_every_request_and_shown_nowhere() -> None:
    server = Server()
    with serving(server) as url:
        engine = attached(url, api_key="s3cret")
        asyncio.run(inspect(engine, "n", limit_s=LIMIT_S))
    assert set(server.tokens) == {"Bearer s3cret"}
    assert "s3cret" not in f"{engine} {engine!r} {engine.channel!r}"


def test_a_reference_that_travelled_without_its_token_is_not_used() -> None:
    server = Server()
    with serving(server) as url:
        arrived = pickle.loads(pickle.dumps(EngineRef(url, id="gen", api_key="s3cret")))
        with pytest.raises(AttachError, match=r"gen \(.*\) cannot be attached: its api_key was given as the token itself") as raised:
            asyncio.run(resolve(arrived, limit_s=LIMIT_S))
    assert "env:NAME" in str(raised.value)
    assert server.asked == []


def test_a_variable_that_is_not_set_is_an_error_that_names_engine_and_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RWS_TEST_KEY", raising=False)
    with pytest.raises(AttachError, match=r"gen \(https://h\) cannot be attached: the environment variable RWS_TEST_KEY") as raised:
        attached("https://h", id="gen", api_key="env:RWS_TEST_KEY")
    assert raised.value.replicas == ("gen",)
    assert "where Ray was started" in str(raised.value)


def test_the_world_size_that_was_configured_is_compared_with_the_servers() -> None:
    with serving(Server(ranks=2)) as url, pytest.raises(AttachError, match=r"it has 2 workers .* EngineRef\(world_size=3\)"):
        attached(url, world_size=3)


def test_a_server_that_does_not_answer_in_time_is_an_error_with_the_limit() -> None:
    server, gate = Server(), threading.Event()
    server.describe = lambda nonce: str(gate.wait(LIMIT_S))
    with serving(server) as url:
        try:
            with pytest.raises(AttachError, match="did not answer") as raised:
                asyncio.run(resolve(url, limit_s=0.5))
        finally:
            gate.set()  # or the server would not end
    assert raised.value.limit_s == 0.5
