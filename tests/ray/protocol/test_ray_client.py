"""`RayVLLMWeightSyncClient` on small actors."""

from __future__ import annotations

import time
from typing import Any

import pytest
import ray
from protocol_actors import Counter, EngineActor, Gate, HoldingActor, NoFinishActor, OldEngineActor

from ray_weightsync.errors import AttachError, ConfigError, EngineCallError, UnsupportedError
from ray_weightsync.protocol.client import VLLMWeightSyncClient
from ray_weightsync.protocol.messages import PerReplica
from ray_weightsync.protocol.ray_client import RayVLLMWeightSyncClient
from tests.ray.killing import kill


def records(*actors: Any) -> list[dict[str, Any]]:
    return ray.get([actor.record.remote() for actor in actors])


def test_a_whole_session_reaches_every_engine_and_labels_come_last() -> None:
    actors = [EngineActor.remote(), EngineActor.remote()]
    client = RayVLLMWeightSyncClient(actors)
    assert isinstance(client, VLLMWeightSyncClient)
    client.init_weight_transfer_engine(PerReplica([{"rank_offset": 1}, {"rank_offset": 3}]))
    client.pause_generation()
    assert client.is_paused() == [True, True]
    client.start_weight_update()
    client.update_weights([{"shape": (1, 2)}, {"dtype": "torch.float16"}])
    client.finish_weight_update(weight_version=3)
    client.resume_generation()
    client.shutdown_weight_transfer_engine()
    assert client.get_weight_version() == ["3", "3"]
    assert client.is_paused() == [False, False]
    for record, offset in zip(records(*actors), (1, 3), strict=True):
        assert record["order"] == ["init", "pause keep False", "start", "update", "finish", "version", "resume", "shutdown"]
        assert record["payloads"] == [{"rank_offset": offset}, [{"shape": [1, 2]}, {"dtype": "float16"}]]


def test_one_init_info_for_several_engines_gives_each_its_own_ranks() -> None:
    actors = [EngineActor.remote(), EngineActor.remote()]
    RayVLLMWeightSyncClient(actors).init_weight_transfer_engine({"master_address": "a", "rank_offset": 1, "world_size": 9})
    assert [record["payloads"][0]["rank_offset"] for record in records(*actors)] == [1, 5]


def test_questions_have_one_answer_per_engine_and_one_handle_is_a_list_of_one() -> None:
    client = RayVLLMWeightSyncClient(EngineActor.remote())
    assert client.get_world_size() == [4]  # read from its vllm_config: AsyncLLM has no such method
    assert client.reset_prefix_cache() == [False]
    assert client.reset_prefix_cache(reset_running_requests=True) == [True]
    assert client.collective_rpc("m", args=(1,), kwargs={"a": 2}) == [[["m", [1], {"a": 2}]]]


def test_ipc_handles_travel_as_they_are_and_the_callers_dict_is_not_modified() -> None:
    actor = EngineActor.remote()
    update = {"names": ["a"], "shapes": [(2,)], "ipc_handles": [{"GPU-1": (int, (b"raw",))}]}
    RayVLLMWeightSyncClient(actor).update_weights(update)
    assert records(actor)[0]["payloads"] == [{"names": ["a"], "shapes": [[2]], "ipc_handles": [{"GPU-1": (int, (b"raw",))}]}]
    assert update["shapes"] == [(2,)]
    with pytest.raises(TypeError, match=r"update_info\['raw'\] is bytes"):
        RayVLLMWeightSyncClient(actor).update_weights({"raw": b""})
    assert len(records(actor)[0]["payloads"]) == 1


def test_one_engine_of_three_that_raises_is_named_and_no_version_moves() -> None:
    actors = [EngineActor.remote(), EngineActor.remote({"update": "raise"}), EngineActor.remote()]
    client = RayVLLMWeightSyncClient(actors)
    client.start_weight_update()
    with pytest.raises(EngineCallError, match="1 of 3 engines failed update_weights") as raised:
        client.update_weights({})
    (name,) = raised.value.failures
    assert name == client.labels[1]
    assert name.startswith("engine 1 (EngineActor ")
    assert raised.value.failures[name].message == "ValueError: no luck in update"
    assert raised.value.failures[name].kind == "raised"
    assert sorted(raised.value.answers) == [client.labels[0], client.labels[2]]  # type: ignore[attr-defined]
    client.finish_weight_update()  # the others are not left in an open session
    assert client.get_weight_version() == ["default"] * 3


def test_a_failure_in_the_label_alone_is_told_and_repeated_alone() -> None:
    actors = [EngineActor.remote(), EngineActor.remote({"version": "raise"}), EngineActor.remote()]
    client = RayVLLMWeightSyncClient(actors)
    with pytest.raises(EngineCallError, match="the weights are finished on every engine; only their label is missing") as raised:
        client.finish_weight_update("v1")
    assert raised.value.phase == "update_weight_version"
    assert client.get_weight_version() == ["v1", "default", "v1"]
    ray.get(actors[1].change.remote({}))
    client.update_weight_version("v1")
    assert client.get_weight_version() == ["v1"] * 3
    assert [record["order"].count("finish") for record in records(*actors)] == [1, 1, 1]


def test_an_engine_killed_between_start_and_update_surfaces_in_seconds_and_the_others_go_on() -> None:
    actors = [EngineActor.remote() for _ in range(3)]
    client = RayVLLMWeightSyncClient(actors, timeout=300)
    client.start_weight_update()
    kill(actors[1])
    began = time.monotonic()
    with pytest.raises(EngineCallError) as raised:
        client.update_weights({})
    assert time.monotonic() - began < 60
    assert raised.value.failures[client.labels[1]].kind == "died"
    RayVLLMWeightSyncClient([actors[0], actors[2]]).finish_weight_update("v1")
    assert [record["order"] for record in records(actors[0], actors[2])] == [["start", "update", "finish", "version"]] * 2


def test_an_engine_that_dies_in_the_call_is_dead_and_not_asked_again() -> None:
    client = RayVLLMWeightSyncClient([EngineActor.remote(), EngineActor.remote({"update": "die"})])
    with pytest.raises(EngineCallError, match="1 of 2") as raised:
        client.update_weights({})
    assert [failure.kind for failure in raised.value.failures.values()] == ["died"]


def test_an_engine_that_misses_the_deadline_is_named_with_the_phase_whichever_it_is() -> None:
    gate, slow = Gate.remote(), EngineActor.remote()
    client = RayVLLMWeightSyncClient([EngineActor.remote(), slow])
    assert client.get_weight_version() == ["default"] * 2  # both are up: the deadline below is for the verb alone
    client.timeout = 1.0
    for verb, call in {
        "init": lambda: client.init_weight_transfer_engine({}),
        "start": client.start_weight_update,
        "update": lambda: client.update_weights({}),
        "finish": client.finish_weight_update,
        "version": lambda: client.update_weight_version("v1"),
    }.items():
        ray.get(slow.change.remote({verb: gate}))
        with pytest.raises(EngineCallError) as raised:
            call()
        assert verb in str(raised.value.phase)
        assert list(raised.value.failures) == [client.labels[1]]
        assert raised.value.failures[client.labels[1]].kind == "unanswered"
    ray.get(gate.open.remote())


def test_an_engine_busy_in_an_update_still_answers_other_questions() -> None:
    gate = Gate.remote()
    client = RayVLLMWeightSyncClient(EngineActor.remote({"update": gate}))

    @ray.remote(num_cpus=0)
    def update(client: RayVLLMWeightSyncClient) -> None:
        client.update_weights({})

    out = update.remote(client)  # the client also travels to another process
    ray.get(gate.arrived.remote())
    assert client.get_weight_version() == ["default"]
    ray.get(gate.open.remote())
    ray.get(out)


def test_it_works_inside_an_async_actor_whose_loop_it_blocks() -> None:
    @ray.remote(num_cpus=0)
    class Trainer:
        async def ask(self, client: RayVLLMWeightSyncClient) -> list[bool]:
            return client.is_paused()

    assert ray.get(Trainer.remote().ask.remote(RayVLLMWeightSyncClient(EngineActor.remote()))) == [False]


def test_an_engine_of_0_26_is_driven_without_versions_and_told_apart_from_a_failure() -> None:
    old = OldEngineActor.remote()
    client = RayVLLMWeightSyncClient([old, EngineActor.remote()])
    client.init_weight_transfer_engine({})
    client.start_weight_update()
    client.update_weights({})
    with pytest.raises(UnsupportedError, match=r"cannot do update_weight_version \(vLLM has it since 0\.28\)") as raised:
        client.finish_weight_update("v1")
    assert raised.value.replicas == (client.labels[0],)
    client.finish_weight_update()
    assert ray.get(old.record.remote()) == ["init", "start", "update", "finish"]
    with pytest.raises(UnsupportedError, match=r"shutdown_weight_transfer_engine \(vLLM has it since 0\.30\)"):
        client.shutdown_weight_transfer_engine()
    with pytest.raises(UnsupportedError, match="start_draft_weight_update"):
        client.start_draft_weight_update()
    with pytest.raises(UnsupportedError, match="get_world_size"):
        client.get_world_size()


class TestRefusedWhenConstructed:
    @pytest.mark.parametrize("handles", [[], ()])
    def test_no_engines(self, handles: Any) -> None:
        with pytest.raises(ConfigError, match="no engines"):
            RayVLLMWeightSyncClient(handles)

    @pytest.mark.parametrize("handles", [None, "engine", ["engine"], {1: 2}, EngineActor])
    def test_what_is_no_handle(self, handles: Any) -> None:
        with pytest.raises(ConfigError, match="must be a Ray actor handle"):
            RayVLLMWeightSyncClient(handles)

    def test_the_same_engine_twice(self) -> None:
        one, other = EngineActor.remote(), EngineActor.remote()
        with pytest.raises(ConfigError, match=r"handles\[2\] is the same actor as handles\[0\]"):
            RayVLLMWeightSyncClient([one, other, one])

    def test_an_actor_that_lacks_one_verb_which_is_named(self) -> None:
        with pytest.raises(AttachError, match=r"handles\[1\].*it lacks finish_weight_update"):
            RayVLLMWeightSyncClient([EngineActor.remote(), NoFinishActor.remote()])

    @pytest.mark.parametrize("cls", [Counter, HoldingActor])
    def test_an_actor_of_another_class(self, cls: Any) -> None:
        with pytest.raises(
            AttachError, match="it lacks init_weight_transfer_engine, start_weight_update, update_weights, finish"
        ) as raised:
            RayVLLMWeightSyncClient(cls.remote())
        assert "EngineRef(handle, attr=...)" in str(raised.value)
