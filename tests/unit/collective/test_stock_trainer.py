"""Our trainer engine toward stock engines: which calls its client is given, when, and how a transfer ends that fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ray_weightsync.config import Collective
from ray_weightsync.errors import ConfigError
from ray_weightsync.trainer.stock_trainer import StockTrainer
from ray_weightsync.transports.collective import stock
from ray_weightsync.transports.collective.rendezvous import GroupError
from ray_weightsync.transports.collective.stock_format import form_for, update_info
from ray_weightsync.transports.native.source import RoundSource
from ray_weightsync.weights.digest import weights_digest
from ray_weightsync.weights.plan import ParamMeta, Plan
from ray_weightsync.weights.sources import StateDictSource
from tests.unit.collective.test_stock_sender import CPU, LIMIT_S, Recorder, failing, plan_of, raw, recorder, source_of

__all__ = ["recorder"]

OPTIONS = Collective(bucket_bytes=4096)


class Client:
    """Engines that answer at once, or raise as they are told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.faults: dict[str, Exception] = {}
        self.updating = threading.Event()

    def _call(self, verb: str, payload: Any = None) -> None:
        self.calls.append((verb, payload))
        if verb in self.faults:
            raise self.faults[verb]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init", init_info)

    def start_weight_update(self) -> None:
        self._call("start")

    def update_weights(self, update_info: Any) -> None:
        self.updating.set()
        self._call("update", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish", weight_version)

    @property
    def verbs(self) -> list[str]:
        return [verb for verb, _ in self.calls]


def feed_of(source: Any) -> RoundSource:
    feed = RoundSource()
    feed.begin(source, plan_of(source))
    return feed


class Failing(StateDictSource):
    """Fails after two tensors."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return failing(StateDictSource(dict(super().__iter__())), 2)


def trainer_to(
    client: Client, recorder: Recorder, feed: RoundSource, *, limit_s: float = LIMIT_S, vllm: tuple[int, int] | None = None
) -> StockTrainer:
    where: dict[str, Any] = {"address": "127.0.0.1", "device": CPU, "communicator": recorder.join}
    return StockTrainer(client, feed, world_size=3, options=OPTIONS, join_s=limit_s, update_s=limit_s, vllm=vllm, **where)


def test_the_group_is_made_once_and_each_transfer_is_a_session_of_its_own(recorder: Recorder) -> None:
    client, source = Client(), source_of()
    feed = feed_of(source)
    trainer = trainer_to(client, recorder, feed)
    for _ in range(2):
        trainer.send_weights()
        assert feed.packed().digest == weights_digest(source)
        assert torch.equal(torch.cat(recorder.received), torch.cat(raw(source)))
        recorder.received.clear()
    trainer.shutdown()
    assert client.verbs == ["init", *["start", "update", "finish"] * 2]
    info = client.calls[0][1]
    assert (info["rank_offset"], info["world_size"], info["master_address"]) == (1, 3, "127.0.0.1")
    assert client.calls[2] == ("update", update_info(feed.plan))
    assert client.calls[3] == ("finish", None), "the label is the coordinator's to publish"
    assert recorder.closed == 1


@pytest.mark.parametrize(("vllm", "packed"), [(None, False), ((0, 31), False), ((0, 32), True)])
def test_scalars_are_packed_for_engines_that_can_all_view_them(
    vllm: tuple[int, int] | None, packed: bool, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(stock.StockSender.__init__.__kwdefaults__, "unique_id", lambda: bytes(128))  # without NCCL
    client = Client()
    trainer_to(client, recorder, feed_of(source_of((3,), ())), vllm=vllm).shutdown()
    assert client.calls[0][1]["packed"] is packed


def test_an_engine_that_fails_to_receive_ends_the_transfer_at_once_and_nothing_is_finished(recorder: Recorder) -> None:
    client, source = Client(), source_of()
    client.faults["update"] = RuntimeError("r1 has died")
    trainer = trainer_to(client, recorder, feed_of(source))
    recorder.gate.clear()  # a broadcast that nobody else is in
    with pytest.raises(GroupError, match="r1 has died"):
        trainer.send_weights()
    assert client.verbs == ["init", "start", "update"]
    trainer.shutdown()


def test_a_source_that_fails_is_the_error_and_the_engines_wait_for_nothing(recorder: Recorder) -> None:
    client, source = Client(), source_of()
    feed = feed_of(source)
    trainer = trainer_to(client, recorder, feed)
    feed.begin(Failing(dict(source)), feed.plan)
    with pytest.raises(ZeroDivisionError):
        trainer.send_weights()
    assert client.verbs == ["init", "start", "update"]
    assert torch.cat(recorder.received).numel() == torch.cat(raw(source)).numel()
    feed.begin(source, feed.plan)
    trainer.send_weights()
    trainer.shutdown()


def test_a_round_that_is_given_up_ends_the_transfer(recorder: Recorder) -> None:
    client, source = Client(), source_of()
    trainer = trainer_to(client, recorder, feed_of(source))
    recorder.gate.clear()
    ending = threading.Thread(target=lambda: (recorder.waiting.wait(LIMIT_S), trainer.abort("r1 is lost")))
    recorder.waiting.clear()
    ending.start()
    with pytest.raises(GroupError, match="r1 is lost"):
        trainer.send_weights()
    ending.join()
    trainer.shutdown()


def test_an_engine_that_cannot_join_is_the_error_and_the_group_is_left(recorder: Recorder) -> None:
    client, source = Client(), source_of()
    client.faults["init"] = RuntimeError("no such address")
    with pytest.raises(RuntimeError, match="no such address"):
        trainer_to(client, recorder, feed_of(source))
    assert recorder.closed == 1


def test_workers_that_do_not_come_are_waited_for_until_the_deadline(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock, "CLOSE_LIMIT_S", 0.1)
    recorder.gate.clear()
    with pytest.raises(TimeoutError, match=r"waited 0\.2 s .* to join"):
        trainer_to(Client(), recorder, feed_of(source_of()), limit_s=0.2)


def _plan(*dtypes: torch.dtype) -> Plan:
    return Plan.from_metadata([ParamMeta(f"t{index}", dtype, (3,)) for index, dtype in enumerate(dtypes)])


def test_a_plan_that_the_packed_format_cannot_carry_goes_tensor_by_tensor_and_one_that_neither_can_is_refused() -> None:
    assert form_for(_plan(torch.bfloat16), buffer_bytes=4096, num_buffers=2).packed
    assert not form_for(_plan(torch.bfloat16, torch.float32), buffer_bytes=4096, num_buffers=2).packed
    scalar = Plan.from_metadata([ParamMeta("scale", torch.float32, ())])
    assert not form_for(scalar, buffer_bytes=4096, num_buffers=2).packed
    with pytest.raises(ConfigError, match="NCCL has no type for"):
        form_for(_plan(torch.bool, torch.float32), buffer_bytes=4096, num_buffers=2)
