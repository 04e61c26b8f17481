"""`HTTPVLLMWeightSyncClient` against real HTTP servers."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest

from ray_weightsync.errors import ConfigError, EngineCallError, UnsupportedError
from ray_weightsync.protocol.client import VLLMWeightSyncClient
from ray_weightsync.protocol.http_client import HTTPVLLMWeightSyncClient
from ray_weightsync.protocol.messages import PerReplica


def test_a_whole_session_reaches_every_server_and_labels_come_last(new_server: Any) -> None:
    servers = [new_server(), new_server()]
    client = HTTPVLLMWeightSyncClient([server.url for server in servers])
    assert isinstance(client, VLLMWeightSyncClient)
    client.init_weight_transfer_engine(PerReplica([{"rank_offset": 1}, {"rank_offset": 3}]))
    client.pause_generation()
    client.start_weight_update()
    client.update_weights({"shapes": [(1, 2)]})
    client.finish_weight_update(weight_version="v1")
    client.resume_generation()
    for server, offset in zip(servers, (1, 3), strict=True):
        assert server.routes == [
            "POST /init_weight_transfer_engine",
            "POST /pause",
            "POST /start_weight_update",
            "POST /update_weights",
            "GET /weight_info",  # asked once: whether this server keeps labels
            "POST /finish_weight_update",
            "POST /update_weight_version",
            "POST /resume",
        ]
        assert server.requests[0].body == {"init_info": {"rank_offset": offset}}
        assert server.requests[1].query == {"mode": "keep", "clear_cache": "false"}
        assert server.requests[5].body is None  # finish and label are two calls, with a barrier between
    client.finish_weight_update(2)
    assert servers[0].routes[8:] == ["POST /finish_weight_update", "POST /update_weight_version"]


def test_questions_have_one_answer_per_server(new_server: Any) -> None:
    client = HTTPVLLMWeightSyncClient([new_server().url, new_server().url])
    assert client.get_weight_version() == ["default", "default"]
    assert client.is_paused() == [False, False]
    assert client.get_world_size() == [2, 2]
    assert client.weight_info() == [{"weight_version": "default"}] * 2
    assert [info["vllm_config"]["instance_id"] for info in client.server_info()] == ["abc", "abc"]
    assert client.reset_prefix_cache(reset_running_requests=True) == [True, True]
    assert client.collective_rpc("rws_describe", args=("n",)) == [[{"rank": 0}, None, "7"]] * 2


def test_one_url_is_a_list_of_one(server: Any) -> None:
    assert HTTPVLLMWeightSyncClient(server.url).is_paused() == [False]


def test_a_failing_server_is_named_with_its_words_after_the_slow_one_has_answered(new_server: Any, answer: Any) -> None:
    good, bad = new_server(), new_server()
    gate = good.gate()
    good.script["POST /update_weights"] = answer({"message": "Weights updated"}, gate=gate)
    bad.script["POST /update_weights"] = answer({"error": {"message": "no such parameter"}}, 500)
    threading.Timer(0.1, gate.set).start()
    with pytest.raises(EngineCallError) as raised:
        HTTPVLLMWeightSyncClient([good.url, bad.url]).update_weights({})
    assert raised.value.phase == "update_weights"
    assert list(raised.value.failures) == [bad.url]
    assert "no such parameter" in str(raised.value)
    assert raised.value.answers == {good.url: None}  # type: ignore[attr-defined]
    assert gate.is_set()


def test_a_server_that_does_not_answer_is_given_up_at_the_deadline(server: Any, answer: Any) -> None:
    server.script["POST /start_weight_update"] = answer({"message": "started"}, gate=server.gate())
    with pytest.raises(EngineCallError, match=r"no answer within 0\.3 s") as raised:
        HTTPVLLMWeightSyncClient(server.url, timeout=0.3).start_weight_update()
    assert raised.value.failures[server.url].kind == "unanswered"
    assert server.routes == ["POST /start_weight_update"]


def test_a_start_that_broke_off_after_it_was_carried_out_is_not_repeated_and_says_so(server: Any, answer: Any) -> None:
    server.script["POST /start_weight_update"] = answer(broken=True)
    with pytest.raises(EngineCallError, match="may have carried the call out") as raised:
        HTTPVLLMWeightSyncClient(server.url).start_weight_update()
    assert server.routes == ["POST /start_weight_update"]
    assert raised.value.failures[server.url].kind == "raised"  # not "died": a connection says nothing about a process


def test_a_server_without_labels_is_told_before_anything_is_finished(new_server: Any, answer: Any) -> None:
    new, old = new_server(), new_server()
    old.script["GET /weight_info"] = answer({"detail": "Not Found"}, 404)
    client = HTTPVLLMWeightSyncClient([new.url, old.url])
    with pytest.raises(UnsupportedError, match=r"cannot do get_weight_version \(vLLM has it since 0\.28\)") as raised:
        client.finish_weight_update("v1")
    assert raised.value.replicas == (old.url,)
    assert "VLLM_SERVER_DEV_MODE=1" in str(raised.value)
    assert (new.routes, old.routes) == (["GET /weight_info"], ["GET /weight_info"])


def test_a_payload_that_cannot_be_sent_to_one_server_is_sent_to_none(new_server: Any) -> None:
    servers = [new_server(), new_server()]
    client = HTTPVLLMWeightSyncClient([server.url for server in servers])
    with pytest.raises(TypeError, match="bytes"):
        client.update_weights(PerReplica([{"a": 1}, {"a": b""}]))
    with pytest.raises(ConfigError, match="allow_pickle=True"):
        client.update_weights(PerReplica([{"a": 1}, {"ipc_handles": [{}]}]))
    assert [server.requests for server in servers] == [[], []]


def test_the_same_server_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"base_urls\[2\] is the same server as base_urls\[0\]"):
        HTTPVLLMWeightSyncClient(["http://h:80/", "http://g", "HTTP://H"])


@pytest.mark.parametrize("urls", [[], (), None, 7, ["http://h", None], "h:8000"])
def test_what_is_no_url_is_refused(urls: Any) -> None:
    with pytest.raises(ConfigError):
        HTTPVLLMWeightSyncClient(urls)


def test_it_travels_and_its_token_does_not_show(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RWS_TEST_KEY", "hunter2")
    client = HTTPVLLMWeightSyncClient(server.url, timeout=5, api_key="env:RWS_TEST_KEY")
    pickled = pickle.dumps(client)
    assert b"hunter2" not in pickled
    again = pickle.loads(pickled)
    assert again.is_paused() == [False]
    assert server.requests[0].headers["Authorization"] == "Bearer hunter2"
    assert again.timeout == 5
    assert "hunter2" not in repr(client) + repr(again)
    assert server.url in repr(client)
