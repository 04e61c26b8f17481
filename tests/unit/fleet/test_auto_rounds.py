"""How a coordinator chooses for its fleet as it is, and what the report says of it. Nothing is sent to GPUs here: the facts are made up."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import Any

import pytest

from ray_weightsync.config import Auto, Collective, FailurePolicy, Host, Native
from ray_weightsync.engines.facts import DeviceFacts
from ray_weightsync.errors import AttachError, RoundAborted
from ray_weightsync.fleet.choosing import SenderFacts
from ray_weightsync.fleet.values import Way
from ray_weightsync.protocol.channel import FINISH, INIT, START, UPDATE
from ray_weightsync.transports.host.layout import NoRoomError, SlotError
from tests.unit.fleet import fakes
from tests.unit.fleet.fake_engine import FakeEngine
from tests.unit.fleet.fakes import FakeFleet, meeting_of, sealed
from tests.unit.fleet.stock_fakes import StockEngine
from tests.unit.fleet.test_broadcast_rounds import run

MINE = DeviceFacts("cuda", "mine")
SENDER = SenderFacts(node_id="node", device=MINE, current=MINE, nccl=True, vllm=True)
ELSEWHERE = Host(directory="/mnt/shm")


class Placed(FakeEngine):
    """An engine whose worker is on a made-up device; or on a backend of vLLM's own, whose workers cannot be asked."""

    def __init__(self, label: str, uuid: str | None, *, backend: str = "rws", nccl: bool = True) -> None:
        super().__init__(label)
        self.nccl = nccl
        self.device = {"type": "cpu", "uuid": None} if uuid is None else {"type": "cuda", "uuid": uuid}
        self.backend = backend

    def _told(self, nonce: str) -> dict[str, Any]:
        told = super()._told(nonce)
        if self.backend != "rws":
            return told | {"backend": self.backend, "workers": None, "devices": [self.device]}
        (worker,) = told["workers"]
        return told | {"workers": [worker | {"device": self.device, "nccl": self.nccl}]}


def fleet_of(*engines: FakeEngine, **settings: Any) -> FakeFleet:
    fleet = FakeFleet(len(engines), transport=Auto(), **settings)
    fleet.engines = list(engines)
    return fleet


@pytest.mark.parametrize(
    ("uuids", "transport", "why"),
    [
        (("a", "b"), Collective(keep_snapshot=True), "auto: every worker has a GPU of its own"),
        (("mine", "mine"), Native("ipc"), "auto: all workers share the sender's GPU mine"),
        (("a", None), Host(), "auto: r1 is on the CPU"),
        (("a", "mine"), Host(), "auto: r1 share the sender's GPU"),
    ],
)
def test_what_the_engines_tell_decides_and_none_is_asked_again(uuids: tuple[str | None, ...], transport: Any, why: str) -> None:
    async def story() -> None:
        fleet = await fleet_of(*(Placed(f"r{index}", uuid) for index, uuid in enumerate(uuids))).attach()
        way = fleet.coordinator.choose_transport(SENDER)
        assert way.transport == transport
        assert way.reason.startswith(why)
        assert not any(engine.calls for engine in fleet.engines)

    run(story)


@pytest.mark.parametrize(
    ("uuid", "transport"), [("a", Collective(keep_snapshot=True, host=ELSEWHERE)), (None, ELSEWHERE), ("mine", Native("ipc"))]
)
def test_what_is_chosen_is_kept_in_host_memory_as_the_session_says(uuid: str | None, transport: Any) -> None:
    async def story() -> None:
        fleet = FakeFleet(1, transport=Auto(host=ELSEWHERE))
        fleet.engines = [Placed("r0", uuid)]
        assert (await fleet.attach()).coordinator.choose_transport(SENDER).transport == transport

    run(story)


@pytest.mark.parametrize(
    ("transport", "host", "option"),
    [
        (ELSEWHERE, ELSEWHERE, "or name another: transport=Host(directory=...)"),
        (Auto(host=ELSEWHERE), ELSEWHERE, "or name another: transport=Auto(host=Host(directory=...))"),
        (Collective(host=ELSEWHERE), ELSEWHERE, "or name another: transport=Collective(host=Host(directory=...), ...)"),
        (Native("sparse_nccl"), Host(), "(docker run --shm-size=...)"),
    ],
)
def test_a_round_that_finds_no_room_says_how_its_session_names_another_directory(transport: Any, host: Host, option: str) -> None:
    async def story() -> None:
        fleet = await FakeFleet(1, transport=transport).attach()

        async def full(node_id: str, **slot: Any) -> Any:
            raise NoRoomError(16, 8, host.directory)

        fleet.stores.open_slot = full  # type: ignore[method-assign]
        with pytest.raises(RoundAborted, match="No room could be had") as caught:
            await fleet.open(1, way=Way(transport=fleet.settings.host, reason="test"))
        assert fleet.settings.host == host
        assert str(caught.value.hint).startswith(f"free or enlarge {host.directory}")
        assert str(caught.value.hint).endswith(option)

    run(story)


ANOTHER = "name a memory-backed directory that is there on each node: transport="


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (
            FileNotFoundError(2, "No such file or directory", "/no/such"),
            ANOTHER,
        ),
        (SlotError("names the environment variable NO_SUCH"), ANOTHER),
        (TimeoutError("no answer"), "call again: a store that has died is started anew"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_directory_that_is_not_there_is_told_from_a_store_that_can_be_started_anew(error: Exception, hint: str) -> None:
    async def story() -> None:
        fleet = await FakeFleet(1, transport=Host(directory="/no/such")).attach()

        async def refused(node_id: str, **slot: Any) -> Any:
            raise error

        fleet.stores.open_slot = refused  # type: ignore[method-assign]
        with pytest.raises(RoundAborted, match="No slot could be had") as caught:
            await fleet.open(1, way=Way(transport=fleet.settings.host, reason="test"))
        assert str(caught.value.hint).startswith(hint)

    run(story)


def test_an_engine_that_comes_later_changes_the_choice_of_the_next_round() -> None:
    async def story() -> None:
        engine = Placed("r0", "a")
        fleet = await fleet_of(engine).attach()
        assert isinstance(fleet.coordinator.choose_transport(SENDER).transport, Collective)
        engine.device = {"type": "cuda", "uuid": "mine"}
        engine.restart()
        await fleet.send(1)  # its preflight looks at every engine anew
        assert fleet.coordinator.choose_transport(SENDER).transport == Native("ipc")

    run(story)


def test_the_report_names_the_way_of_its_own_round_and_why() -> None:
    async def story() -> None:
        fleet = await fleet_of(Placed("r0", None)).attach()
        way = fleet.coordinator.choose_transport(SENDER)
        ticket = await fleet.open(1, way=way)
        report = await fleet.coordinator.rounds.commit(ticket.snapshot, sealed=sealed("digest"), holds_turn=True)
        assert (report.transport, report.transport_reason) == ("host", "auto: r0 is on the CPU")
        ticket = await fleet.open(2, way=Way(transport=Host(), reason="auto: another one"))
        report = await fleet.coordinator.rounds.commit(ticket.snapshot, sealed=sealed("digest"), holds_turn=True)
        assert report.transport_reason == "auto: another one"

    run(story)


def test_what_is_staged_goes_by_host_memory_and_says_so() -> None:
    async def story() -> None:
        fleet = await fleet_of(Placed("r0", "a")).attach()
        report = await fleet.send(1)
        assert (report.transport, report.transport_reason) == ("host", "auto: it is staged, and what is staged waits in host memory")

    run(story)


def test_what_heals_is_named_by_itself_and_not_by_what_was_asked_for() -> None:
    async def story() -> None:
        fleet = await fleet_of(Placed("r0", None), Placed("r1", None), on_failure=FailurePolicy(min_serving=1)).attach()
        fleet.engines[1].faults["outcome"] = "raise"
        await fleet.send(1)
        report = await fleet.coordinator.repair.heal("r1")
        assert (report.transport, report.transport_reason) == ("host", "what is kept is in host memory")

    run(story)


def test_engines_that_no_transport_reaches_are_named_before_anything_is_sent() -> None:
    async def story() -> None:
        fleet = await fleet_of(Placed("r0", "a", backend="ipc"), Placed("r1", "mine", backend="ipc")).attach()
        with pytest.raises(RoundAborted, match=re.escape("r0 are not on the sender's GPU")) as caught:
            fleet.coordinator.choose_transport(SENDER)
        assert "vllm_engine_args" in str(caught.value)
        assert str(caught.value).startswith("Nothing changed")

    run(story)


def test_a_transport_that_was_asked_for_and_cannot_get_to_the_engines_is_refused_before_anything_is_sent() -> None:
    async def story() -> None:
        fleet = FakeFleet(2, transport=Native("ipc"))
        fleet.engines = [Placed("r0", "mine"), Placed("r1", "a")]
        await fleet.attach()
        with pytest.raises(RoundAborted, match=r"transport='native:ipc' does not reach these engines") as caught:
            fleet.coordinator.choose_transport(SENDER)
        assert "r1 are not on the sender's GPU mine" in str(caught.value)
        assert [engine.calls for engine in fleet.engines] == [[], []]
        assert fleet.coordinator.choose_transport(replace(SENDER, current=None)).transport == Native("ipc")

    run(story)


def test_a_broadcast_that_was_asked_for_is_refused_before_anything_is_sent_where_nccl_is_missing() -> None:
    async def story() -> None:
        fleet = FakeFleet(2, transport=Collective())
        fleet.engines = [Placed("r0", "a"), Placed("r1", "b", nccl=False)]
        await fleet.attach()
        with pytest.raises(RoundAborted, match=r"nccl4py is missing in workers of r1,.*pip install"):
            fleet.coordinator.choose_transport(SENDER)
        with pytest.raises(RoundAborted, match=r"nccl4py is missing in the sender's process,.*pip install"):
            fleet.coordinator.choose_transport(replace(SENDER, nccl=False))
        assert [engine.calls for engine in fleet.engines] == [[], []]

    run(story)


@pytest.mark.parametrize(
    ("uuid", "nccl", "why"), [("b", False, "nccl4py is missing in worker 0"), (None, True, "worker 0 is not on a GPU")]
)
def test_an_engine_that_came_back_without_nccl_is_left_out_of_a_broadcast_from_a_gpu(
    monkeypatch: pytest.MonkeyPatch, uuid: str | None, nccl: bool, why: str
) -> None:
    async def story() -> None:
        monkeypatch.setattr(fakes, "meeting_of", lambda: replace(meeting_of(), backend="nccl"))
        fleet = FakeFleet(2, transport=Collective())
        other = Placed("r1", "b")
        fleet.engines = [Placed("r0", "a"), other]
        await fleet.attach()
        await fleet.broadcast(1)
        fleet.coordinator.choose_transport(SENDER)
        other.restart()
        other.device, other.nccl = Placed("", uuid).device, nccl
        fleet.forget_calls()
        report = await fleet.broadcast(2)
        assert report.committed == ("r0",)
        assert why in str(report.notes)
        assert "pause" not in other.calls

    run(story)


def test_an_engine_that_came_back_on_a_backend_of_vllms_own_does_not_decide_for_those_who_serve() -> None:
    async def story() -> None:
        fleet = await fleet_of(Placed("r0", "a"), Placed("r1", "b")).attach()
        fleet.engines[1].restart()
        fleet.engines[1].backend = "nccl"  # type: ignore[attr-defined]
        await fleet.send(1)  # its preflight looks at every engine anew, and leaves this one out
        assert fleet.coordinator.status().replicas[1].state == "QUARANTINED"
        assert fleet.coordinator.choose_transport(SENDER).transport == Collective(keep_snapshot=True)

    run(story)


@pytest.mark.parametrize(("backend", "transport"), [("nccl", Collective()), ("ipc", Native("ipc"))])
def test_engines_on_vllms_own_backends_may_be_attached_and_are_chosen_their_way(backend: str, transport: Any) -> None:
    async def story() -> None:
        fleet = await fleet_of(Placed("r0", "mine" if backend == "ipc" else "a", backend=backend)).attach()
        assert fleet.coordinator.choose_transport(SENDER).transport == transport

    run(story)


def test_a_way_to_stock_engines_is_named_in_the_report_as_it_was_chosen() -> None:
    async def story() -> None:
        class PlacedStock(StockEngine):
            def _told(self, nonce: str) -> dict[str, Any]:
                return super()._told(nonce) | {"devices": [{"type": "cuda", "uuid": "a"}]}

        fleet = await fleet_of(PlacedStock("r0")).attach()
        rounds, way = fleet.coordinator.rounds, fleet.coordinator.choose_transport(SENDER)
        ticket = await fleet.open(1, offer=Native("nccl"), way=way)
        committing = asyncio.ensure_future(rounds.commit(ticket.snapshot, holds_turn=True))
        await rounds.live.members(ticket.snapshot)
        for verb, payload in ((INIT, {"rank_offset": 1}), (START, None), (UPDATE, {}), (FINISH, None)):
            await rounds.live.call(ticket.snapshot, verb, payload)
        await rounds.seal(ticket.snapshot, sealed("digest"), keep_turn=True)
        report = await committing
        assert (report.transport, report.transport_reason) == ("collective", way.reason)

    run(story)


def test_a_backend_that_no_round_chooses_is_refused_when_it_is_attached() -> None:
    async def story() -> None:
        with pytest.raises(AttachError, match="transport='native:sharded_rdt'"):
            await fleet_of(Placed("r0", "a", backend="sharded_rdt")).attach()

    run(story)


def test_a_round_for_all_or_none_is_chosen_a_way_that_can_be_gone_back_from() -> None:
    async def story() -> None:
        fleet = await fleet_of(Placed("r0", "mine"), on_failure=FailurePolicy(after_start="all_or_none")).attach()
        assert fleet.coordinator.choose_transport(SENDER).transport == Host()

    run(story)
