"""vLLM's trainer engines take the current GPU of their thread for the one that weights are on; here both are made so. No GPU is used."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ray_weightsync.trainer.native import NativeEngines
from ray_weightsync.transports.native.engine import current_gpu, on_device
from ray_weightsync.transports.native.patches import Patches
from ray_weightsync.weights.packing import Packed
from ray_weightsync.weights.plan import Plan
from ray_weightsync.weights.sources import StateDictSource

ELSEWHERE = torch.device("meta")
"""A second device that is there on every machine."""


def test_what_is_elsewhere_is_brought_to_the_gpu_and_what_is_there_is_not_copied() -> None:
    here, away = torch.empty(2, device=ELSEWHERE), torch.ones(2)
    pairs = dict(on_device([("here", here), ("away", away)], ELSEWHERE))
    assert pairs["here"] is here
    assert pairs["away"].device == ELSEWHERE


def test_patches_are_brought_to_the_gpu_before_an_update_is_open() -> None:
    one = SimpleNamespace(name="a", indices=torch.tensor([1], dtype=torch.int32), values=torch.ones(1), full_shape=[2])
    patches = Patches([one])
    assert patches.on_device(None) == [one]
    (there,) = patches.on_device(ELSEWHERE)
    assert (there.name, there.full_shape, there.indices.device, there.values.device) == ("a", (2,), ELSEWHERE, ELSEWHERE)


def test_without_a_gpu_nothing_is_moved() -> None:
    tensor = torch.ones(2)
    assert current_gpu() is None
    assert dict(on_device([("a", tensor)], None))["a"] is tensor


def test_what_the_sending_thread_s_stream_does_to_the_weights_is_over_before_another_thread_reads_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda gpu: SimpleNamespace(synchronize=lambda: waited.append(gpu)))
    nobody: Any = None
    source = StateDictSource({"a": torch.ones(1)})
    NativeEngines(nobody, nobody).take("key").begin("round", source, Plan.from_metadata(source.metadata()), 1.0)
    assert waited == [3]


def test_the_thread_of_a_trainer_engine_uses_the_gpu_of_the_thread_that_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[str, int]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: used.append((threading.current_thread().name, index)))

    def make(client: Any, source: Any, members: Any) -> Any:
        raise OSError(f"made after {used}")

    nobody: Any = None
    driven = NativeEngines(nobody, make).take("key")
    over: Future[Packed] = Future()
    thread = threading.Thread(target=driven.run, args=(nobody, over), name="sends")
    thread.start()
    with pytest.raises(OSError, match=r"made after \[\('sends', 3\)\]"):
        over.result(30)
    thread.join(30)
