"""What both clients share, over plain fake channels: all answers are waited for, every failure keeps its engine's name."""

from __future__ import annotations

import asyncio
import logging
import pickle
import subprocess
import sys
import textwrap
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from ray_weightsync.errors import ConfigError, EngineCallError, UnsupportedError
from ray_weightsync.protocol import channel as verbs
from ray_weightsync.protocol.blocking import BlockingClient, Call
from ray_weightsync.protocol.client import VLLMWeightSyncClient
from ray_weightsync.protocol.messages import Payload, PerReplica
from ray_weightsync.protocol.reading import EngineRestarted


class FakeChannel:
    """Answers at once, unless a verb is scripted: with an exception to raise, or a gate to wait at."""

    def __init__(self, label: str, script: dict[str, Any] | None = None, *, lacks: tuple[str, ...] = ()) -> None:
        self.label = label
        self.script = script or {}
        self.lacks = lacks
        self.order: list[Any] = []

    def supports(self, verb: str) -> bool:
        return verb not in self.lacks

    async def call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        self.order.append((verb, *args) if args else verb)
        what = self.script.get(verb)
        if isinstance(what, BaseException):
            raise what
        if isinstance(what, threading.Event):
            while not what.is_set():
                await asyncio.sleep(0.001)
            return None
        return what


class FakeClient(BlockingClient):
    def __init__(self, channels: Sequence[FakeChannel], timeout: float = 30) -> None:
        self.channels = list(channels)
        super().__init__(self.channels, timeout=timeout)

    def _payload_calls(self, verb: str, payloads: Sequence[Payload]) -> list[Call]:
        return [partial(channel.call, verb, each) for channel, each in zip(self.channels, payloads, strict=True)]


def fleet(*scripts: dict[str, Any], timeout: float = 30) -> FakeClient:
    return FakeClient([FakeChannel(f"e{index}", script) for index, script in enumerate(scripts)], timeout)


@pytest.fixture
def gate() -> Any:
    event = threading.Event()
    yield event
    event.set()


SESSION = [(verbs.INIT, ({},)), (verbs.START, ()), (verbs.UPDATE, ({},)), (verbs.FINISH, ()), (verbs.SET_VERSION, ("v1",))]


@pytest.mark.parametrize(("verb", "args"), SESSION)
class TestEachPhase:
    def test_an_engine_that_misses_the_deadline_is_named_with_its_phase_and_the_answers_of_the_others_are_kept(
        self, verb: str, args: Any, gate: threading.Event
    ) -> None:
        client = fleet({}, {verb: gate}, {}, timeout=0.2)
        with pytest.raises(EngineCallError) as raised:
            getattr(client, verb)(*args)
        error = raised.value
        assert (error.phase, error.replicas, error.limit_s) == (verb, ("e1",), 0.2)
        assert error.failures["e1"].kind == "unanswered"
        assert f"1 of 3 engines failed {verb}, 2 did it: e1 did not answer (no answer within 0.2 s)" in str(error)
        assert isinstance(error, EngineCallError)
        assert sorted(error.answers) == ["e0", "e2"]

    def test_an_engine_that_raises_is_named_after_all_have_answered(self, verb: str, args: Any, gate: threading.Event) -> None:
        client = fleet({verb: ValueError("no luck")}, {verb: gate}, {})
        threading.Timer(0.05, gate.set).start()
        with pytest.raises(EngineCallError, match="ValueError: no luck") as raised:
            getattr(client, verb)(*args)
        assert gate.is_set()  # the slow one was waited for
        assert raised.value.failures["e0"].kind == "raised"
        assert list(raised.value.failures) == ["e0"]
        assert raised.value.engine_message == "ValueError: no luck"


def test_every_failure_is_told_of_and_death_is_told_from_an_error(gate: threading.Event) -> None:
    client = fleet({verbs.START: EngineRestarted("gone")}, {verbs.START: KeyError("x")}, {verbs.START: gate}, timeout=0.2)
    with pytest.raises(EngineCallError) as raised:
        client.start_weight_update()
    assert {label: failure.kind for label, failure in raised.value.failures.items()} == {"e0": "died", "e1": "raised", "e2": "unanswered"}
    assert "e0 died (gone); e1 raised (KeyError: 'x'); e2 did not answer" in str(raised.value)
    again = pickle.loads(pickle.dumps(raised.value))
    assert (type(again), str(again), again.failures) == (type(raised.value), str(raised.value), raised.value.failures)


class TestLabels:
    def test_no_engine_is_labelled_before_all_have_finished(self, gate: threading.Event) -> None:
        order: list[str] = []

        class Recording(FakeChannel):
            async def call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
                answer = await super().call(verb, *args, **kwargs)
                order.append(verb)
                return answer

        client = FakeClient([Recording("e0"), Recording("e1", {verbs.FINISH: gate})])
        threading.Timer(0.05, gate.set).start()
        client.finish_weight_update(7)
        assert order == [verbs.FINISH] * 2 + [verbs.SET_VERSION] * 2
        assert client.channels[0].order[-1] == (verbs.SET_VERSION, "7")

    def test_a_fleet_that_did_not_finish_everywhere_is_not_labelled_anywhere(self) -> None:
        client = fleet({}, {verbs.FINISH: ValueError("half")}, {})
        with pytest.raises(EngineCallError, match="no version label was changed: 1 of 3 engines failed finish_weight_update") as raised:
            client.finish_weight_update("v1")
        assert raised.value.phase == verbs.FINISH
        assert [channel.order for channel in client.channels] == [[verbs.FINISH]] * 3

    def test_a_failure_in_the_label_alone_says_so_and_only_that_step_is_repeated(self) -> None:
        client = fleet({}, {verbs.SET_VERSION: ValueError("busy")}, {})
        with pytest.raises(EngineCallError) as raised:
            client.finish_weight_update("v1")
        assert raised.value.phase == verbs.SET_VERSION
        assert str(raised.value).startswith("the weights are finished on every engine; only their label is missing: 1 of 3")
        assert "update_weight_version may be repeated alone" in str(raised.value)
        client.channels[1].script.clear()
        client.update_weight_version("v1")
        assert [channel.order.count(verbs.FINISH) for channel in client.channels] == [1, 1, 1]

    def test_a_version_that_is_no_label_is_refused_before_finish(self) -> None:
        client = fleet({})
        for version in ("", None, 1.5, True, "a\nb", "!rws:x", "x" * 10_000, " v"):
            if version is not None:
                with pytest.raises(ConfigError):
                    client.finish_weight_update(version)  # type: ignore[arg-type]
            with pytest.raises(ConfigError):
                client.update_weight_version(version)  # type: ignore[arg-type]
        assert client.channels[0].order == []

    def test_versions_of_any_language_and_integers_are_labels(self) -> None:
        client = fleet({})
        client.update_weight_version("步骤-7")
        client.update_weight_version(7)
        assert client.channels[0].order == [(verbs.SET_VERSION, "步骤-7"), (verbs.SET_VERSION, "7")]

    def test_an_engine_that_reports_no_version_is_none(self) -> None:
        assert fleet({verbs.GET_VERSION: "v1"}, {verbs.GET_VERSION: None}).get_weight_version() == ["v1", None]

    def test_an_engine_that_keeps_no_labels_is_named_before_anything_is_finished(self) -> None:
        client = FakeClient([FakeChannel("new"), FakeChannel("old", lacks=(verbs.SET_VERSION, verbs.GET_VERSION))])
        with pytest.raises(UnsupportedError, match=r"old cannot do update_weight_version \(vLLM has it since 0\.28\)") as raised:
            client.finish_weight_update("v1")
        assert raised.value.replicas == ("old",)
        assert [channel.order for channel in client.channels] == [[], []]
        client.finish_weight_update()
        assert [channel.order for channel in client.channels] == [[verbs.FINISH]] * 2


class TestPayloads:
    def test_each_replica_gets_its_own_and_all_get_a_common_one(self) -> None:
        client = fleet({}, {})
        client.init_weight_transfer_engine(PerReplica([{"rank_offset": 1}, {"rank_offset": 3}]))
        client.update_weights([{"rank": 0}])
        assert [channel.order for channel in client.channels] == [
            [(verbs.INIT, {"rank_offset": 1}), (verbs.UPDATE, [{"rank": 0}])],
            [(verbs.INIT, {"rank_offset": 3}), (verbs.UPDATE, [{"rank": 0}])],
        ]

    def test_a_number_of_payloads_that_is_not_that_of_the_engines_is_refused(self) -> None:
        client = fleet({}, {})
        with pytest.raises(ConfigError, match="3 payloads for 2 engines: e0, e1"):
            client.init_weight_transfer_engine(PerReplica([{}, {}, {}]))
        assert client.channels[0].order == []


def test_questions_are_answered_in_the_order_of_the_engines() -> None:
    client = fleet(
        {verbs.IS_PAUSED: True, verbs.WORLD_SIZE: 2, verbs.RESET_PREFIX_CACHE: True, verbs.COLLECTIVE_RPC: [1, 2]},
        {verbs.IS_PAUSED: False, verbs.WORLD_SIZE: 1, verbs.RESET_PREFIX_CACHE: None, verbs.COLLECTIVE_RPC: [3]},
    )
    assert client.is_paused() == [True, False]
    assert client.get_world_size() == [2, 1]
    assert client.reset_prefix_cache() == [True, False]  # anything but True is a no
    assert client.collective_rpc("m") == [[1, 2], [3]]


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan"), True, "5", None])
def test_a_timeout_that_is_no_positive_number_of_seconds_is_refused(timeout: Any) -> None:
    with pytest.raises(ConfigError, match="timeout must be"):
        fleet({}, timeout=timeout)


def test_a_client_without_engines_is_refused() -> None:
    with pytest.raises(ConfigError, match="no engines"):
        fleet()


def test_a_client_works_where_an_event_loop_is_blocked_by_its_caller() -> None:
    async def inside_an_async_actor() -> list[bool]:
        return fleet({verbs.IS_PAUSED: True}).is_paused()

    assert asyncio.run(inside_an_async_actor()) == [True]


def test_two_threads_use_one_client_at_once(gate: threading.Event) -> None:
    client = fleet({verbs.UPDATE: gate, verbs.IS_PAUSED: True})
    update = threading.Thread(target=client.update_weights, args=({},))
    update.start()
    assert client.is_paused() == [True]  # while the update is out: vLLM's trainer engines call from a second thread
    assert update.is_alive()
    gate.set()
    update.join(10)
    assert not update.is_alive()


def test_a_late_answer_is_logged_with_what_it_said(gate: threading.Event) -> None:
    said = threading.Event()
    heard: list[str] = []

    class Late(FakeChannel):
        async def call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
            await super().call(verb)
            raise ValueError("too late")

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())
            said.set()

    handler = Heard()
    logging.getLogger("ray_weightsync.protocol.blocking").addHandler(handler)
    try:
        with pytest.raises(EngineCallError):
            FakeClient([Late("e0", {verbs.START: gate})], timeout=0.1).start_weight_update()
        gate.set()
        assert said.wait(10)
    finally:
        logging.getLogger("ray_weightsync.protocol.blocking").removeHandler(handler)
    assert heard == ["start_weight_update of e0 was answered after its deadline: ValueError: too late"]


def test_it_is_a_client_in_vllms_sense_and_what_lacks_a_verb_is_none() -> None:
    assert isinstance(fleet({}), VLLMWeightSyncClient)

    class NoFinish:
        def init_weight_transfer_engine(self, init_info: Any) -> None: ...

        def start_weight_update(self) -> None: ...

        def update_weights(self, update_info: Any) -> None: ...

    assert not isinstance(NoFinish(), VLLMWeightSyncClient)


def test_importing_the_room_imports_neither_torch_nor_ray_nor_requests() -> None:
    program = textwrap.dedent("""
        import sys, ray_weightsync.protocol as room
        print([name for name in ("torch", "vllm", "ray", "requests") if name in sys.modules])
        room.HTTPVLLMWeightSyncClient("http://127.0.0.1:1")
        print([name for name in ("torch", "vllm", "ray") if name in sys.modules])
        room.RayVLLMWeightSyncClient
        print([name for name in ("torch", "vllm") if name in sys.modules])
        print([name for name in room.__all__ if not hasattr(room, name)], room.__all__ == sorted(room.__all__))
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split("\n")[:4] == ["[]", "[]", "[]", "[] True"]


class TestRanks:
    INFO: dict[str, Any] = {"master_address": "a", "master_port": 1, "rank_offset": 1, "world_size": 4}  # noqa: RUF012

    def test_each_engine_gets_its_own_rank_offset_when_all_were_sent_one(self) -> None:
        client = fleet({verbs.WORLD_SIZE: 1}, {verbs.WORLD_SIZE: 2})
        client.init_weight_transfer_engine(self.INFO)
        assert [channel.order[-1] for channel in client.channels] == [(verbs.INIT, {**self.INFO, "rank_offset": each}) for each in (1, 2)]

    def test_a_group_of_another_size_is_refused_before_anything_is_sent(self) -> None:
        client = fleet({verbs.WORLD_SIZE: 1}, {verbs.WORLD_SIZE: 1})
        with pytest.raises(ConfigError, match="world_size=4"):
            client.init_weight_transfer_engine(self.INFO)
        assert [channel.order for channel in client.channels] == [[verbs.WORLD_SIZE]] * 2

    def test_a_single_engine_and_what_is_said_for_each_are_left_as_they_are(self) -> None:
        one, two = fleet({}), fleet({}, {})
        one.init_weight_transfer_engine(self.INFO)
        two.init_weight_transfer_engine(PerReplica([self.INFO, self.INFO]))
        assert [channel.order for channel in (*one.channels, *two.channels)] == [[(verbs.INIT, self.INFO)]] * 3
