"""The sender toward stock engines, with a communicator that records what the engines would get, or does not come back."""

from __future__ import annotations

import base64
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from ray_weightsync.errors import ConfigError
from ray_weightsync.transports.collective.rendezvous import GroupError
from ray_weightsync.transports.collective.stock import StockSender
from ray_weightsync.transports.collective.stock_format import StockFormat
from ray_weightsync.transports.collective.stock_meeting import Means
from ray_weightsync.weights.digest import weights_digest
from ray_weightsync.weights.plan import Plan
from ray_weightsync.weights.sources import StateDictSource

LIMIT_S = 30.0
CPU = torch.device("cpu")
FORMS = [StockFormat(packed_buffer_size_bytes=size, packed_num_buffers=buffers) for size in (1, 999, 1 << 30) for buffers in (1, 3)]
FORMS.append(StockFormat(packed=False))


class Recorder:
    """What every receiver would hold. ``gate`` holds broadcasts back; an abort ends them, as NCCL's does."""

    passes_on = True
    rank = 0
    world_size = 3
    device = CPU

    def __init__(self) -> None:
        self.received: list[torch.Tensor] = []
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Event()
        self.aborted = threading.Event()
        self.closed = 0
        self.error: Exception | None = None
        self.means: Means | None = None

    def join(self, means: Means, world_size: int, device: torch.device, limit_s: float) -> Recorder:
        assert (world_size, device) == (self.world_size, CPU)
        self.means = means
        self._wait()
        return self

    def broadcast(self, buffer: torch.Tensor, src: int) -> None:
        assert src == 0
        if self.error is not None:
            raise self.error
        self._wait()
        self.received.append(buffer.clone())

    def abort(self) -> None:
        self.aborted.set()
        self.gate.set()

    def close(self) -> None:
        self.closed += 1

    def _wait(self) -> None:
        self.waiting.set()
        assert self.gate.wait(LIMIT_S)
        if self.aborted.is_set():
            raise GroupError("the group was aborted")


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    yield recorder
    recorder.gate.set()


def sender_to(recorder: Recorder, form: StockFormat = FORMS[0], *, joined: bool = True, **options: Any) -> StockSender:
    sender = StockSender(form, world_size=3, address="127.0.0.1", device=CPU, communicator=recorder.join, **options)
    if joined:
        sender.join(limit_s=LIMIT_S)
    return sender


def source_of(*shapes: tuple[int, ...]) -> StateDictSource:
    generator = torch.Generator().manual_seed(0)
    shapes = shapes or ((300, 2), (0, 4), (5, 100), (), (7,), (2000,))
    tensors = {f"t{number}": torch.randn(shape, generator=generator) for number, shape in enumerate(shapes)}
    tensors["transposed"] = torch.randn(10, 20, generator=generator).t()
    return StateDictSource(tensors)


def plan_of(source: StateDictSource) -> Plan:
    return Plan.from_metadata(source.metadata())


def failing(source: StateDictSource, after: int) -> Iterator[tuple[str, torch.Tensor]]:
    for number, pair in enumerate(source):
        if number == after:
            raise ZeroDivisionError("the optimizer is broken")
        yield pair


def raw(source: StateDictSource) -> list[torch.Tensor]:
    return [tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in source]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_tensor_arrives_end_to_end_in_the_broadcasts_of_its_cut_and_the_digest_is_the_sources(
    recorder: Recorder, form: StockFormat
) -> None:
    source = source_of()
    plan = plan_of(source)
    with sender_to(recorder, form) as sender:
        for _ in range(2):
            packed = sender.send(source, plan, limit_s=LIMIT_S)
            assert packed.digest == weights_digest(source)
            assert [piece.numel() for piece in recorder.received] == [sum(spec.nbytes for spec in cut) for cut in form.cuts(plan)]
            assert torch.equal(torch.cat(recorder.received), torch.cat(raw(source)))
            recorder.received.clear()
    assert recorder.closed == 1


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("after", [0, 3, 6])
def test_when_the_source_fails_the_receivers_get_all_that_they_wait_for_and_the_group_stays(
    recorder: Recorder, form: StockFormat, after: int
) -> None:
    source = source_of()
    plan = plan_of(source)
    with sender_to(recorder, form) as sender:
        with pytest.raises(ZeroDivisionError) as raised:
            sender.send(failing(source, after), plan, limit_s=LIMIT_S)
        assert not hasattr(raised.value, "__notes__")
        whole, arrived = torch.cat(raw(source)), torch.cat(recorder.received)
        num_placed = sum(spec.nbytes for spec in plan.tensors[:after])
        assert [piece.numel() for piece in recorder.received] == [sum(spec.nbytes for spec in cut) for cut in form.cuts(plan)]
        assert torch.equal(arrived[:num_placed], whole[:num_placed])
        assert not arrived[num_placed:].any()
        assert sender.send(source, plan, limit_s=LIMIT_S).digest == weights_digest(source)


def test_a_source_that_disagrees_with_its_plan_leaves_no_receiver_waiting_either(recorder: Recorder) -> None:
    plan = plan_of(source_of())
    with sender_to(recorder) as sender, pytest.raises(ConfigError, match="transposed"):
        sender.send(list(source_of())[:-1], plan, limit_s=LIMIT_S)
    assert sum(piece.numel() for piece in recorder.received) == plan.weight_bytes


def test_a_receiver_that_stands_still_is_a_timeout_that_says_how_far_it_got_and_the_group_is_lost(recorder: Recorder) -> None:
    source = source_of((4,), (4,))
    with sender_to(recorder) as sender:
        recorder.gate.clear()
        with pytest.raises(TimeoutError, match=r"waited 0\.3 s for the slowest receiver; 0 of 832 bytes were sent"):
            sender.send(source, plan_of(source), limit_s=0.3)
        assert recorder.aborted.is_set()
        with pytest.raises(GroupError, match=r"is lost \(waited 0\.3 s .*kill the engines that are stuck"):
            sender.send(source, plan_of(source), limit_s=LIMIT_S)
    assert recorder.received == []


def test_a_source_that_is_late_is_a_timeout_and_the_group_is_lost(recorder: Recorder) -> None:
    source = source_of()

    def late() -> Iterator[tuple[str, torch.Tensor]]:
        pairs = iter(source)
        yield next(pairs)
        threading.Event().wait(0.3)
        yield from pairs

    with sender_to(recorder) as sender:
        with pytest.raises(TimeoutError, match=r"waited 0\.2 s for the source"):
            sender.send(late(), plan_of(source), limit_s=0.2)
        assert recorder.aborted.is_set()


def test_a_failure_of_nccl_is_told_in_its_words_and_the_group_is_lost(recorder: Recorder) -> None:
    source = source_of()
    with sender_to(recorder) as sender:
        recorder.error = RuntimeError("NCCL error: unhandled system error")
        with pytest.raises(GroupError, match=r"a broadcast failed after 0 bytes: .*unhandled system error"):
            sender.send(source, plan_of(source), limit_s=LIMIT_S)
        with pytest.raises(GroupError, match="is lost"):
            sender.send(source, plan_of(source), limit_s=LIMIT_S)


def test_a_source_and_a_receiver_that_both_fail_are_the_sources_error_with_a_note(recorder: Recorder) -> None:
    source = source_of()

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield next(iter(source))
        assert recorder.waiting.wait(LIMIT_S)
        raise ZeroDivisionError

    with sender_to(recorder) as sender:
        recorder.waiting.clear()
        recorder.gate.clear()
        with pytest.raises(ZeroDivisionError) as raised:
            sender.send(broken(), plan_of(source), limit_s=0.5)
        assert "The group is lost too: " in raised.value.__notes__[0]
        assert "waited 0.5 s for the slowest receiver" in raised.value.__notes__[0]


def test_an_abort_ends_a_transfer_at_once_with_its_reason(recorder: Recorder) -> None:
    source = source_of()
    with sender_to(recorder) as sender, ThreadPoolExecutor(1) as pool:
        recorder.waiting.clear()
        recorder.gate.clear()
        sending = pool.submit(sender.send, source, plan_of(source), limit_s=LIMIT_S)
        assert recorder.waiting.wait(LIMIT_S)
        sender.abort("r1 died")
        with pytest.raises(GroupError, match="r1 died"):
            sending.result(LIMIT_S)


def test_a_plan_that_engines_cannot_read_is_refused_before_anything_is_sent(recorder: Recorder) -> None:
    source = StateDictSource({"a": torch.zeros(3, dtype=torch.bool), "b": torch.zeros(2)})
    with sender_to(recorder, FORMS[2]) as sender:
        with pytest.raises(ConfigError, match="'b'"):
            sender.send(source, plan_of(source), limit_s=LIMIT_S)
        assert recorder.received == []
        assert sender.send(source_of(), plan_of(source_of()), limit_s=LIMIT_S).num_tensors == 7


def test_workers_that_do_not_come_are_a_timeout_that_says_where_they_were_awaited(recorder: Recorder) -> None:
    recorder.gate.clear()
    with sender_to(recorder, joined=False) as sender:
        with pytest.raises(TimeoutError, match=r"waited 0\.2 s at 127\.0\.0\.1:\d+ for the engines' 2 workers") as late:
            sender.join(limit_s=0.2)
        assert str(late.value).endswith("if they have no way there, Collective(interface=...) names another address")
        with pytest.raises(GroupError, match="is lost"):
            sender.join(limit_s=LIMIT_S)
        recorder.gate.set()
    assert recorder.closed == 1  # it came late, and did not stay


@pytest.mark.parametrize("vllm", [(0, 28), (0, 32)], ids=["at_a_socket", "by_a_unique_id"])
def test_a_join_that_fails_raises_at_once_though_engines_still_wait_for_it(recorder: Recorder, vllm: tuple[int, int]) -> None:
    def join(*_: Any) -> Recorder:
        raise GroupError("vLLM finds no NCCL library here")

    still_waiting = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        engine = pool.submit(still_waiting.wait, LIMIT_S)  # an engine's init, which nothing ends
        try:
            began = time.monotonic()
            sender = StockSender(
                FORMS[0], world_size=3, vllm=vllm, address="127.0.0.1", device=CPU, communicator=join, unique_id=lambda: bytes(128)
            )
            with sender, pytest.raises(GroupError, match="no NCCL library"):
                sender.join(limit_s=LIMIT_S)
            assert time.monotonic() - began < LIMIT_S / 3
            assert not engine.done()
        finally:
            still_waiting.set()


def test_each_replica_is_told_the_place_where_the_sender_listens_already(recorder: Recorder) -> None:
    with sender_to(recorder, joined=False) as sender:
        info = sender.init_info(rank_offset=2, world_size=3)
        assert (info["rank_offset"], info["world_size"], info["packed_buffer_size_bytes"]) == (2, 3, 1)
        with socket.create_connection((info["master_address"], info["master_port"]), timeout=LIMIT_S):
            pass
        with pytest.raises(GroupError, match="a group of 4, the sender's is of 3"):
            sender.init_info(rank_offset=1, world_size=4)


def test_engines_that_can_are_told_a_unique_id_and_no_place_and_the_sender_joins_by_the_same(recorder: Recorder) -> None:
    unique_id = bytes(range(128))
    with sender_to(recorder, joined=False, vllm=(0, 30), unique_id=lambda: unique_id) as sender:
        info = sender.init_info(rank_offset=1, world_size=3)
        assert base64.b64decode(info["nccl_unique_id_b64"], validate=True) == unique_id
        assert not {"master_address", "master_port"} & set(info)
        sender.join(limit_s=LIMIT_S)
        assert recorder.means == unique_id
        source = source_of()
        assert sender.send(source, plan_of(source), limit_s=LIMIT_S).digest == weights_digest(source)


@pytest.mark.parametrize("vllm", [None, (0, 28), (0, 29)])
def test_where_one_engine_may_be_too_old_all_meet_at_a_socket_and_no_id_is_made(recorder: Recorder, vllm: Any) -> None:
    def unique_id() -> bytes:
        raise AssertionError("nobody can read it")

    with sender_to(recorder, vllm=vllm, unique_id=unique_id) as sender:
        assert "nccl_unique_id_b64" not in sender.init_info(rank_offset=1, world_size=3)
        assert isinstance(recorder.means, socket.socket)


def test_workers_that_do_not_come_by_a_unique_id_are_a_timeout_too(recorder: Recorder) -> None:
    recorder.gate.clear()
    with sender_to(recorder, joined=False, vllm=(0, 32), unique_id=lambda: bytes(128)) as sender:
        with pytest.raises(TimeoutError, match=r"waited 0\.2 s by an NCCL unique id for the engines' 2 workers.*NCCL_SOCKET_IFNAME"):
            sender.join(limit_s=0.2)
        recorder.gate.set()
    assert recorder.closed == 1


def test_workers_are_told_the_nodes_address_in_ray_unless_an_interface_is_named(recorder: Recorder, in_ray: str) -> None:
    for interface, address in ((None, in_ray), ("lo", "127.0.0.1")):
        with StockSender(FORMS[0], world_size=3, interface=interface, device=CPU, communicator=recorder.join) as sender:
            assert sender.init_info(rank_offset=1, world_size=3)["master_address"] == address


def test_a_sender_sends_only_between_join_and_close(recorder: Recorder) -> None:
    source = source_of()
    sender = sender_to(recorder, joined=False)
    with pytest.raises(GroupError, match="join the group"):
        sender.send(source, plan_of(source), limit_s=LIMIT_S)
    sender.join(limit_s=LIMIT_S)
    with pytest.raises(GroupError, match="joined before"):
        sender.join(limit_s=LIMIT_S)
    sender.close()
    sender.close()
    with pytest.raises(GroupError, match="closed"):
        sender.send(source, plan_of(source), limit_s=LIMIT_S)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_said_what_to_use_instead() -> None:
    with pytest.raises(ConfigError, match=r"(?s)needs a GPU.*host or the collective transport"):
        StockSender(StockFormat(), world_size=2)
