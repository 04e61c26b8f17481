"""A trainer actor is waited for through its own step, and then as long as the coordinator says that its round may take."""

from __future__ import annotations

from typing import Any

import pytest

from ray_weightsync.config import Timeouts
from ray_weightsync.errors import WeightSyncError
from ray_weightsync.session_options import settings_of
from ray_weightsync.trainer import driving as module
from ray_weightsync.trainer.driving import through_trainer

SETTINGS = settings_of(timeouts=Timeouts(gather_s=100, warn_every_s=10))


class Trainer:
    """Comes to it, and through it, after so many seconds; they pass only while somebody waits."""

    name, handle = "s", "coordinator"

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, ends_at: float, longest_turn_s: float) -> None:
        self.ends_at, self.turn_s = ends_at, longest_turn_s
        self.now = 0.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(module.ray, "wait", self._wait)
        monkeypatch.setattr(module.ray, "get", lambda ref, timeout: "report")
        self.rws_send_weights = type("Method", (), {"remote": staticmethod(lambda *args: args)})

    def _wait(self, refs: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        self.now += timeout
        return (refs, []) if self.now >= self.ends_at else ([], refs)

    def longest_turn_s(self) -> float:
        return self.turn_s


def send(trainer: Trainer) -> Any:
    return through_trainer(trainer, "send", trainer, SETTINGS, 1, "wait")  # type: ignore[arg-type]


@pytest.mark.parametrize("ends_at", [50, 500, 2000])
def test_a_round_of_large_weights_is_not_given_up_in_its_middle(monkeypatch: pytest.MonkeyPatch, ends_at: float) -> None:
    assert send(Trainer(monkeypatch, ends_at=ends_at, longest_turn_s=1000)) == "report"


def test_a_trainer_that_does_not_come_to_it_is_named_when_any_round_would_be_over(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(monkeypatch, ends_at=9999, longest_turn_s=1000)
    with pytest.raises(WeightSyncError, match="has not come to send version 1") as caught:
        send(trainer)
    assert caught.value.limit_s == 2100
    assert trainer.now == 2110
