"""What `auto` comes to, and the fact that it names: every rule by itself, then all combinations against what each transport can do."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_weightsync.config import Collective, Host, Native
from ray_weightsync.engines.facts import DeviceFacts, EngineFacts, WorkerFacts
from ray_weightsync.engines.ref import EngineRef
from ray_weightsync.engines.resolve import Engine
from ray_weightsync.fleet.choosing import Choice, MemberFacts, SenderFacts, choose, member_of, out_of_reach
from ray_weightsync.fleet.topology import Shape

CPU = DeviceFacts("cpu")
MINE = DeviceFacts("cuda", "mine")
KEPT = Collective(keep_snapshot=True)


def gpu(uuid: str | None) -> DeviceFacts:
    return DeviceFacts("cuda", uuid)


def sender(device: DeviceFacts = MINE, **fields: Any) -> SenderFacts:
    values: dict[str, Any] = {"current": MINE, "nccl": True, "vllm": True, **fields}
    return SenderFacts(node_id="node", device=device, **values)


def member(name: str, *devices: DeviceFacts, **fields: Any) -> MemberFacts:
    values: dict[str, Any] = {"kind": "async", "nccl": True, **fields}
    shape = values.pop("shape", Shape(id=name, world_size=max(1, len(devices))))
    return MemberFacts(shape=shape, devices=devices, **values)


APART = [member("r0", gpu("a")), member("r1", gpu("b"), gpu("c"))]
TOGETHER = [member("r0", MINE), member("r1", MINE)]
STOCK_NCCL = [member("r0", stock="nccl", nccl=False), member("r1", stock="nccl", nccl=False, kind="http")]
STOCK_IPC = [member("r0", MINE, stock="ipc", nccl=False)]


class TestAskedFor:
    """A transport that a user named. What is found here is found before anybody is paused."""

    @pytest.mark.parametrize(
        ("transport", "members", "why"),
        [
            (Native("ipc"), APART, r"r0, r1 are not on the sender's GPU mine, and CUDA IPC reaches no other"),
            (Native("ipc"), [TOGETHER[0], member("r1", MINE, gpu("b"))], r"^r1 are not on the sender's GPU"),
            (Collective(), TOGETHER, r"r0, r1 share the sender's GPU mine, and NCCL takes one rank a GPU"),
            (Native("nccl"), [APART[0], member("r1", MINE)], r"^r1 share the sender's GPU mine"),
            (Collective(), [member("r0", gpu("a")), member("r1", gpu("a"))], r"r0 and r1 share GPU a"),
            (Collective(), [member("r0", CPU), member("r1", gpu("a"))], r"^r0 are not on GPUs, and the sender's bytes go from its GPU"),
            (Native("sharded_rdt"), [member("r0", CPU)], r"^r0 are not on GPUs"),
            (Collective(), [APART[0], member("r1", gpu("b"), nccl=False)], r"nccl4py is missing in workers of r1,.*pip install"),
            (Collective(), [APART[0], member("r1", nccl=False)], r"nccl4py is missing in workers of r1,"),
        ],
    )
    def test_engines_that_it_cannot_get_to_are_named(self, transport: Any, members: Sequence[MemberFacts], why: str) -> None:
        assert re.search(why, out_of_reach(transport, sender(), members) or "")

    @pytest.mark.parametrize("of", [sender(num_ranks=4), sender(CPU, current=None, num_ranks=4)])
    def test_an_engine_of_vllms_that_waits_for_every_rank_of_the_trainer_is_not_called_by_one(self, of: SenderFacts) -> None:
        for backend in ("ipc", "sharded_rdt"):
            assert re.search(r"one of 4 ranks of torch's default process group", out_of_reach(Native(backend), of, TOGETHER) or "")
        for transport in (Host(), Collective(), Native("nccl"), Native("nccl_m2n"), Native("carrier_pigeon")):
            assert out_of_reach(transport, of, APART) is None

    @pytest.mark.parametrize("members", [APART, [member("r0", nccl=None)]])
    def test_a_broadcast_of_a_sender_without_nccl_is_not_begun(self, members: Sequence[MemberFacts]) -> None:
        assert re.search(
            r"nccl4py is missing in the sender's process,.*pip install", out_of_reach(Collective(), sender(nccl=False), members) or ""
        )

    def test_what_vllm_brings_itself_needs_no_nccl_of_ours(self) -> None:
        for transport in (Collective(), Native("nccl")):
            assert out_of_reach(transport, sender(nccl=False), STOCK_NCCL) is None
        assert out_of_reach(Native("nccl"), sender(nccl=False), [member("r0", gpu("a"), nccl=False)]) is None

    @pytest.mark.parametrize(
        ("transport", "members"),
        [
            (Native("ipc"), TOGETHER),
            (Native("ipc"), [member("r0"), member("r1", gpu(None))]),
            (Collective(), APART),
            (Collective(), [member("r0", nccl=None), member("r1", gpu(None))]),
            (Native("nccl"), STOCK_NCCL),
            (Native("sharded_rdt"), TOGETHER),
            (Host(), [member("r0", CPU), *TOGETHER[1:]]),
        ],
    )
    def test_what_it_gets_to_or_might_is_left_to_it(self, transport: Any, members: Sequence[MemberFacts]) -> None:
        assert out_of_reach(transport, sender(), members) is None

    @pytest.mark.parametrize("transport", [Native("ipc"), Native("nccl"), Collective()])
    def test_without_a_gpu_in_the_sender_nothing_is_known(self, transport: Any) -> None:
        assert out_of_reach(transport, sender(CPU, current=None), [member("r0", CPU), *TOGETHER[1:]]) is None


class TestOurWorkers:
    def test_gpus_of_their_own_are_broadcast_to_and_a_snapshot_is_kept_as_in_any_other_round(self) -> None:
        choice = choose(sender(), APART)
        assert choice == Choice(KEPT, "every worker has a GPU of its own, and NCCL is installed on both sides")

    def test_all_or_none_can_be_gone_back_from_what_a_broadcast_keeps(self) -> None:
        assert choose(sender(), APART, all_or_none=True).transport == KEPT

    @pytest.mark.parametrize("kind", ["http", "torch"])
    def test_a_broadcast_reaches_engines_that_can_be_paused_whose_workers_tell_where_they_are(self, kind: Any) -> None:
        assert choose(sender(), [APART[0], dataclasses.replace(APART[1], kind=kind)]).transport == KEPT

    def test_the_sender_s_own_gpu_is_lent_out(self) -> None:
        assert choose(sender(), TOGETHER) == Choice(Native("ipc"), "all workers share the sender's GPU mine")

    def test_nccl_is_not_needed_on_one_gpu_nor_vllm_on_several(self) -> None:
        assert choose(sender(nccl=False), TOGETHER).transport == Native("ipc")
        assert choose(sender(vllm=False), APART).transport == KEPT

    @pytest.mark.parametrize(
        ("of", "members", "why"),
        [
            (sender(CPU, current=None), APART, r"weights are on the CPU \(the sender's process has no GPU\)"),
            (sender(CPU), APART, r"weights are on the CPU \(the sender's process has a GPU, which they are not on\)"),
            (sender(CPU), TOGETHER, "weights are on the CPU"),
            (sender(DeviceFacts("xpu"), current=None), APART, "weights are on a device of type 'xpu'"),
            (sender(gpu(None), current=gpu(None)), APART, "cannot be told which GPU the weights are on"),
            (
                sender(gpu("a")),
                TOGETHER,
                "weights are on GPU a, the current one of the sender's process is GPU mine: torch.cuda.set_device",
            ),
            (sender(), [], "nobody"),
            (sender(), [*APART, member("r2", CPU)], "r2 is on the CPU"),
            (sender(), [*TOGETHER, member("r2", CPU)], "r2 is on the CPU"),
            (sender(), [member("r0", CPU), member("r1", CPU)], "r0 is on the CPU"),
            (sender(), [*APART, member("r2", DeviceFacts("xpu"))], "r2 is on a device of type 'xpu'"),
            (sender(), [*APART, member("r2", kind="client")], "cannot be seen what every worker of r2 is on"),
            (sender(), [*APART, member("r2", gpu(None))], "cannot be told which GPU r2 are on"),
            (sender(), [*APART, member("r2", MINE)], "r2 share the sender's GPU and not every worker does"),
            (sender(), [member("r0", MINE, gpu("a"))], "r0 share the sender's GPU and not every worker does"),
            (sender(), [*APART, member("r2", gpu("c"))], "r1 and r2 share GPU c"),
            (sender(), [member("r0", gpu("a"), gpu("a"))], "two workers of r0 share a GPU"),
            (sender(nccl=False), APART, r"nccl4py is missing in the sender's process,.*: pip install"),
            (sender(), [*APART, member("r2", gpu("d"), nccl=False)], "nccl4py is missing in workers of r2"),
            (sender(), [*APART, member("r2", gpu("d"), kind="sync")], "r2 hold a synchronous LLM, for whose requests nobody can wait"),
            (sender(vllm=False), TOGETHER, "vLLM, whose CUDA IPC it would be, is missing in the sender's process"),
            (sender(vllm=False), [member("r0", MINE, kind="torch")], "r0 shares the sender's GPU and is a torch engine"),
            (sender(num_ranks=4), TOGETHER, "the sender is one of 4 ranks of torch's default process group"),
            (sender(), [*TOGETHER, member("r2", MINE, kind="http")], "r2 shares the sender's GPU and is behind HTTP"),
            (sender(), [member("r0", MINE, kind="sync")], "r0 shares the sender's GPU and is a synchronous LLM"),
            (sender(), [member("r0", MINE, kind="torch")], "r0 shares the sender's GPU and is a torch engine"),
            (
                sender(),
                [member("r0", gpu("a"), shape=Shape(id="r0", world_size=1, data_parallel_index=1))],
                "cannot be given ranks: r0 is data-parallel engine 1",
            ),
        ],
    )
    def test_else_it_is_host_memory_and_the_fact_that_decided_is_named(self, of: SenderFacts, members: list[MemberFacts], why: str) -> None:
        choice = choose(of, members)
        assert choice.transport == Host()
        assert re.search(why, choice.why), choice.why

    def test_all_or_none_on_one_gpu_goes_by_what_keeps_the_version_before(self) -> None:
        choice = choose(sender(), TOGETHER, all_or_none=True)
        assert choice.transport == Host()
        assert "all_or_none" in choice.why


class TestStockEngines:
    def test_nccl_is_broadcast_to_in_actors_and_behind_servers(self) -> None:
        choice = choose(sender(nccl=False), STOCK_NCCL)
        assert choice.transport == Collective()
        assert "r0 (backend 'nccl'), r1 (backend 'nccl')" in choice.why

    def test_ipc_on_the_sender_s_gpu_is_lent_its_memory(self) -> None:
        choice = choose(sender(), STOCK_IPC)
        assert choice.transport == Native("ipc")
        assert "share the sender's GPU mine" in choice.why

    @pytest.mark.parametrize(
        ("of", "members", "why"),
        [
            (sender(CPU, current=None), STOCK_NCCL, r"r0 \(backend 'nccl'\).* by that alone: the weights are on the CPU"),
            (sender(CPU), STOCK_IPC, "by that alone: the weights are on the CPU"),
            (sender(vllm=False), STOCK_NCCL, "vLLM is missing in the sender's process"),
            (sender(vllm=False), STOCK_IPC, "vLLM is missing in the sender's process"),
            (sender(num_ranks=2), STOCK_IPC, "by that alone: the sender is one of 2 ranks"),
            (sender(), [member("r0", MINE, stock="nccl")], "r0 share the sender's GPU, and NCCL takes one rank a GPU"),
            (sender(), [member("r0", gpu("a"), stock="nccl"), member("r1", gpu("a"), stock="nccl")], "r0 and r1 share GPU a"),
            (sender(), [member("r0", CPU, stock="nccl")], "by that alone: r0 is on the CPU"),
            (sender(), [member("r0", stock="nccl", kind="sync")], "r0 cannot be called while an update is open"),
            (sender(), [member("r0", stock="nccl", shape=Shape(id="r0", world_size=None))], "cannot be given ranks"),
            (sender(), [member("r0", stock="ipc")], "cannot be seen which GPU r0 are on"),
            (sender(), [*STOCK_IPC, member("r1", gpu("a"), stock="ipc")], "r1 are not on the sender's GPU"),
            (sender(), [member("r0", MINE, stock="ipc", kind="http")], "behind HTTP"),
            (sender(), [member("r0", MINE, stock="ipc", kind="sync")], "synchronous LLM"),
            (sender(), [member("r0", gpu("a"), stock="sharded_rdt")], r"auto does not choose .*transport=Native\('sharded_rdt'"),
            (
                sender(),
                [*STOCK_IPC, member("r1", gpu("a"), stock="nccl")],
                r"no transport reaches r0 \(backend 'ipc'\), r1 \(backend 'nccl'\)",
            ),
            (sender(), [*APART, *STOCK_IPC], r"r0 \(backend 'ipc'\) are on vLLM's own backends and r0, r1 are not"),
        ],
    )
    def test_else_there_is_no_way_and_the_fact_that_decided_is_named(self, of: SenderFacts, members: list[MemberFacts], why: str) -> None:
        choice = choose(of, members)
        assert choice.transport is None
        assert re.search(why, choice.why), choice.why

    @pytest.mark.parametrize("members", [STOCK_NCCL, STOCK_IPC])
    def test_nothing_brings_them_back_so_all_or_none_is_refused(self, members: list[MemberFacts]) -> None:
        choice = choose(sender(), members, all_or_none=True)
        assert choice.transport is None
        assert "all_or_none" in choice.why


DEVICES = st.sampled_from([CPU, MINE, gpu("a"), gpu("b"), gpu("c"), gpu(None), DeviceFacts("xpu")])
SENDERS = st.builds(
    SenderFacts,
    node_id=st.just("node"),
    device=st.sampled_from([MINE, MINE, CPU, gpu("a"), gpu(None)]),
    current=st.sampled_from([MINE, MINE, None, gpu(None)]),
    nccl=st.booleans(),
    vllm=st.booleans(),
    num_ranks=st.sampled_from([1, 1, 2]),
)


@st.composite
def fleets(draw: st.DrawFn) -> list[MemberFacts]:
    members = []
    stocks = draw(st.sampled_from([(None,), (None,), ("nccl",), ("ipc",), (None, "nccl"), ("nccl", "ipc"), ("sparse_nccl",)]))
    # Either whatever there is, or the settings in which something can be chosen; the former alone hardly ever meets them.
    among = draw(st.sampled_from([DEVICES, st.just(MINE), st.sampled_from([gpu(str(n)) for n in range(9)])]))
    for index in range(draw(st.integers(0, 3))):
        devices = tuple(draw(st.lists(among, max_size=2)))
        size = draw(st.sampled_from([len(devices) or 1, len(devices) or 1, None]))
        members.append(
            MemberFacts(
                shape=Shape(id=f"r{index}", world_size=size),
                kind=draw(st.sampled_from(["async", "async", "sync", "torch", "http", "client"])),
                stock=draw(st.sampled_from(stocks)),
                devices=devices,
                nccl=draw(st.sampled_from([True, True, False])),
            )
        )
    return members


def sends(of: SenderFacts, transport: Host | Collective | Native, members: Sequence[MemberFacts]) -> bool:
    """Whether a sender can send in this way at all. Written down from what each transport needs, not from the rules."""
    if isinstance(transport, Host):
        return True
    from_gpu = of.device.type == "cuda" and of.device.uuid is not None and of.current == of.device
    stock = any(each.stock is not None for each in members)
    if isinstance(transport, Native) and of.num_ranks > 1:
        return False  # CUDA IPC's sender gathers handles from all ranks
    return from_gpu and (of.vllm if isinstance(transport, Native) or stock else of.nccl)


def receives(of: SenderFacts, transport: Host | Collective | Native, each: MemberFacts, others: Sequence[MemberFacts]) -> bool:
    """Whether one member can receive in this way."""
    if isinstance(transport, Host):
        return each.stock is None
    if isinstance(transport, Native):
        return each.stock in (None, transport.backend) and each.kind == "async" and set(each.devices) == {of.device}
    taken = [of.device, *(device for other in others for device in other.devices)]
    alone = all(device.uuid is None or device not in taken for device in each.devices) and len(set(each.devices)) == len(each.devices)
    if each.stock is not None:
        alone = alone and all(device.type == "cuda" for device in each.devices)
        return each.stock == "nccl" and each.kind in ("async", "http") and each.shape.world_size is not None and alone
    known = bool(each.devices) and all(device.type == "cuda" and device.uuid is not None for device in each.devices)
    return known and alone and each.nccl and each.kind != "sync" and each.shape.world_size is not None


@given(SENDERS, fleets(), st.booleans())
def test_what_is_chosen_can_be_sent_and_every_member_can_receive_it(of: SenderFacts, members: list[MemberFacts], all_or_none: bool) -> None:
    choice = choose(of, members, all_or_none=all_or_none)
    assert choice.why
    if choice.transport is None:
        assert any(each.stock is not None for each in members), "engines with our worker side are always reached"
        return
    assert sends(of, choice.transport, members)
    for each in members:
        assert receives(of, choice.transport, each, [other for other in members if other is not each]), (choice, each)
    if all_or_none:
        keeps = isinstance(choice.transport, Host) or (isinstance(choice.transport, Collective) and choice.transport.keep_snapshot)
        assert keeps, "there would be nothing to go back to"


@given(SENDERS, fleets())
def test_the_order_of_the_fleet_decides_nothing(of: SenderFacts, members: list[MemberFacts]) -> None:
    assert choose(of, members).transport == choose(of, members[::-1]).transport


class TestMembers:
    def engine(self, facts: EngineFacts, **ref: Any) -> Engine:
        channel: Any = None
        return Engine(id="r0", label="r0", channel=channel, facts=facts, ref=EngineRef("r0", id="r0", **ref))

    def worker(self, rank: int, device: DeviceFacts | None, *, nccl: bool = True) -> WorkerFacts:
        return WorkerFacts(nonce="n", rank=rank, world_size=2, package_version="1", device=device, nccl=nccl)

    def test_a_worker_that_does_not_tell_leaves_the_engine_unknown(self) -> None:
        workers = (self.worker(0, gpu("a")), self.worker(1, gpu("b")))
        assert member_of(self.engine(EngineFacts(kind="async", world_size=2, backend="rws", workers=workers))).devices == (
            gpu("a"),
            gpu("b"),
        )
        workers = (self.worker(0, gpu("a")), self.worker(1, None))
        assert member_of(self.engine(EngineFacts(kind="async", world_size=2, backend="rws", workers=workers))).devices == ()

    def test_workers_that_could_not_be_asked_leave_it_unknown_too(self) -> None:
        facts = EngineFacts(
            kind="async", world_size=4, data_parallel_size=2, backend="rws", workers=(self.worker(0, MINE), self.worker(1, MINE))
        )
        assert member_of(self.engine(facts)).devices == ()
        part = dataclasses.replace(facts, data_parallel_index=0)
        assert member_of(self.engine(part, deployment="d")).devices == (MINE, MINE), "a part of a deployment has its own workers only"

    def test_one_worker_without_nccl_is_an_engine_without(self) -> None:
        workers = (self.worker(0, gpu("a")), self.worker(1, gpu("b"), nccl=False))
        assert member_of(self.engine(EngineFacts(kind="async", world_size=2, backend="rws", workers=workers))).nccl is False

    def test_an_engine_whose_workers_cannot_be_asked_may_have_nccl(self) -> None:
        assert member_of(self.engine(EngineFacts(kind="async", world_size=1, backend="rws", devices=(MINE,)))).nccl is None

    def test_a_stock_engine_is_where_its_configuration_says(self) -> None:
        found = member_of(self.engine(EngineFacts(kind="async", world_size=1, backend="ipc", devices=(MINE,))))
        assert (found.stock, found.devices) == ("ipc", (MINE,))

    @pytest.mark.parametrize("facts", [EngineFacts(kind="client"), EngineFacts(kind="torch", world_size=1, backend="rws")])
    def test_what_has_our_worker_side_or_is_not_known_is_not_stock(self, facts: EngineFacts) -> None:
        assert member_of(self.engine(facts)).stock is None
