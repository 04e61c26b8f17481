"""How long a caller waits for its coordinator: as long as that says that its turns may take, and no longer."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, GetTimeoutError

from ray_weightsync.config import Timeouts
from ray_weightsync.errors import ConfigError, WeightSyncError
from ray_weightsync.fleet import link as module
from ray_weightsync.fleet.link import CoordinatorLink


class Coordinator:
    """Answers what it is asked at a time of its own; time passes only while somebody waits.

    Attributes:
        turns_s: What it says that a turn may take, asked again and again.
        answers_at: When the one call that is not for that is answered, in seconds.
        dies_at: When it dies with the calls that it was given until then; its successor answers.
        killed_at: When it was killed.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *turns_s: float, answers_at: float, interrupted: bool = False, dies_at: float | None = None
    ) -> None:
        self.turns_s = list(turns_s)
        self.answers_at = answers_at
        self.interrupted = interrupted
        self.dies_at = dies_at
        self.now = 0.0
        self.killed_at: float | None = None
        monkeypatch.setattr(module.ray, "get", self._get)
        monkeypatch.setattr(module.ray, "kill", self._kill)
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(module.time, "sleep", lambda seconds: None)

    def __getattr__(self, name: str) -> Any:
        return type("Method", (), {"remote": staticmethod(lambda *args: name)})

    def _get(self, ref: str, *, timeout: float) -> Any:
        if ref == "longest_turn_s":
            return self.turns_s.pop(0) if len(self.turns_s) > 1 else self.turns_s[0]
        if self.dies_at is not None and self.now + timeout >= self.dies_at:
            self.now, self.dies_at = self.dies_at, None
            raise ActorUnavailableError("restarting", None)
        self.now = min(self.now + timeout, self.answers_at)
        if self.now < self.answers_at:
            raise GetTimeoutError("not yet")
        if self.interrupted:
            raise KeyboardInterrupt
        return "done"

    def _kill(self, handle: Any) -> None:
        assert handle is self
        self.killed_at = self.now


def link_to(coordinator: Coordinator) -> CoordinatorLink:
    return CoordinatorLink("s", coordinator, timeouts=Timeouts())  # type: ignore[arg-type]


@pytest.mark.parametrize("answers_at", [5, 100, 2009])
def test_what_has_to_wait_for_turns_is_waited_for_as_long_as_they_may_take(monkeypatch: pytest.MonkeyPatch, answers_at: float) -> None:
    coordinator = Coordinator(monkeypatch, 1000, answers_at=answers_at)
    assert link_to(coordinator).ask("heal", limit_s=10, turns=2) == "done"


def test_a_turn_that_began_after_the_call_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = Coordinator(monkeypatch, 100, 1000, answers_at=900)
    assert link_to(coordinator).ask("remove", limit_s=10, turns=1) == "done"


def test_and_no_longer_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = Coordinator(monkeypatch, 1000, answers_at=5000)
    with pytest.raises(WeightSyncError, match="did not answer") as caught:
        link_to(coordinator).ask("heal", limit_s=10, turns=2)
    assert (coordinator.now, caught.value.limit_s) == (2010, 2010)


def test_what_waits_for_no_turn_has_its_own_limit_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = Coordinator(monkeypatch, 1000, answers_at=11)
    with pytest.raises(WeightSyncError, match="did not answer"):
        link_to(coordinator).ask("status", limit_s=10)
    assert coordinator.now == 10


@pytest.mark.parametrize("dies_at", [5, 300, 900])
def test_a_coordinator_that_dies_in_a_turn_that_was_waited_for_gives_way_to_a_successor(
    monkeypatch: pytest.MonkeyPatch, dies_at: float
) -> None:
    coordinator = Coordinator(monkeypatch, 1000, answers_at=dies_at + 50, dies_at=dies_at)
    assert link_to(coordinator).ask("remove", limit_s=10, turns=1) == "done"


def test_a_coordinator_is_not_killed_in_the_middle_of_a_round_that_may_still_take_time(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = Coordinator(monkeypatch, 1500, answers_at=1400)
    link_to(coordinator).end(limit_s=90)
    assert coordinator.killed_at == 1400


def test_one_that_is_later_than_it_may_be_is_ended(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    coordinator = Coordinator(monkeypatch, 1500, answers_at=9999)
    link_to(coordinator).end(limit_s=90)
    assert coordinator.killed_at == 1590
    assert "did not close cleanly" in caplog.text


def test_an_interrupted_end_leaves_it_to_finish_what_it_is_at(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = Coordinator(monkeypatch, 1500, answers_at=10, interrupted=True)
    with pytest.raises(KeyboardInterrupt):
        link_to(coordinator).end(limit_s=90)
    assert coordinator.killed_at is None


@pytest.mark.parametrize("later", [None, ("elsewhere", "01")], ids=["shut down", "another cluster"])
def test_after_a_shutdown_of_ray_no_call_starts_or_joins_another_cluster(monkeypatch: pytest.MonkeyPatch, later: Any) -> None:
    connections = [("here", "01"), later]
    monkeypatch.setattr(module, "_connection", lambda: connections.pop(0) if len(connections) > 1 else connections[0])
    link = CoordinatorLink("s", object(), timeouts=Timeouts())  # type: ignore[arg-type]  # it can be asked nothing
    with pytest.raises(ConfigError, match="Ray was shut down in this process, and session s ended with it"):
        link.ask("status", limit_s=10)
    assert not link.connected


def test_a_thread_beside_the_users_own_does_not_wait_inside_ray(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link = link_to(Coordinator(monkeypatch, 0, answers_at=0))
    monkeypatch.setattr(module.ray, "get", lambda ref, **options: pytest.fail("it waits inside Ray"))
    answer: Future[str] = Future()
    ref = SimpleNamespace(future=lambda: answer)
    with pytest.raises(WeightSyncError, match="did not answer"):
        link.wait_aside(ref, "watch", limit_s=0)
    answer.set_result("done")
    assert link.wait_aside(ref, "watch", limit_s=0) == "done"
