"""A trainer engine that nobody will use again is shut down, whenever the wait for it ended."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from ray_weightsync.config import Native, Timeouts
from ray_weightsync.trainer import native
from ray_weightsync.trainer.native import NativeEngines, Relaying
from ray_weightsync.weights.plan import Plan
from ray_weightsync.weights.sources import StateDictSource


class Engine:
    """Reads all, and finishes."""

    def __init__(self, client: Any, source: Any, members: Any) -> None:
        self.client, self.source = client, source
        self.over = threading.Event()

    def send_weights(self) -> None:
        list(self.source)
        self.client.finished = True

    def abort(self, reason: str) -> None:
        """Nothing waits."""

    def shutdown(self) -> None:
        self.over.set()


class Members:
    key, stock = "key", True


class Unwatched(Relaying):
    def _watch_for(self, *args: Any, **kwargs: Any) -> None:
        """Nobody is lost."""


def sending(engines: NativeEngines, *, by: type[Relaying] = Unwatched) -> None:
    source = StateDictSource({"a": torch.ones(2)})
    link: Any = None
    by(link, Native("ipc"), Timeouts(), engines)._send("round", Members, source, Plan.from_metadata(source.metadata()), None)


def test_one_that_sends_while_its_sender_is_closed() -> None:
    made: list[Engine] = []

    class Closed(Engine):
        def send_weights(self) -> None:
            super().send_weights()
            engines.close()

    link: Any = None
    engines = NativeEngines(link, lambda *args: made.append(Closed(*args)) or made[-1])  # type: ignore[func-returns-value]
    sending(engines)
    assert made[0].over.wait(30)


def test_one_that_is_kept_when_the_next_round_cannot_begin() -> None:
    class Unwatchable(Relaying):
        def _watch_for(self, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("the coordinator cannot be called")

    made: list[Engine] = []
    link: Any = None
    engines = NativeEngines(link, lambda *args: made.append(Engine(*args)) or made[-1])  # type: ignore[func-returns-value]
    sending(engines)
    with pytest.raises(RuntimeError, match="cannot be called"):
        sending(engines, by=Unwatchable)
    engines.close()
    assert made[0].over.wait(30)


def test_one_that_is_kept_when_the_sending_stream_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Engine] = []
    link: Any = None
    engines = NativeEngines(link, lambda *args: made.append(Engine(*args)) or made[-1])  # type: ignore[func-returns-value]
    sending(engines)

    def failing(*args: Any) -> None:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(native._Driven, "begin", failing)
    with pytest.raises(RuntimeError, match="CUDA error"):
        sending(engines)
    assert made[0].over.wait(30)


def test_one_that_came_to_its_end_as_the_wait_for_it_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(Future[Any]):
        def result(self, timeout: float | None = None) -> Any:
            super().result(timeout)
            raise KeyboardInterrupt

    monkeypatch.setattr(native, "Future", Interrupted)
    made: list[Engine] = []
    link: Any = None
    engines = NativeEngines(link, lambda *args: made.append(Engine(*args)) or made[-1])  # type: ignore[func-returns-value]
    with pytest.raises(KeyboardInterrupt):
        sending(engines)
    assert made[0].over.wait(30)
