"""New engines in place of lost ones: once each, not for ever, and never on the thread that tells of changes."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from ray_weightsync import replacer as module
from ray_weightsync.errors import ConfigError, WeightSyncError
from ray_weightsync.follower import nothing_known
from ray_weightsync.replacer import Replacer
from ray_weightsync.report import FleetStatus, ReplicaStatus
from tests.unit.test_view import replica

LIMIT_S = 10


class Session:
    """Stands for a session whose coordinator knows these replicas."""

    def __init__(self, *replicas: ReplicaStatus) -> None:
        self.replicas = {each.id: each for each in replicas}
        self.refuses = 0

    def status(self) -> FleetStatus:
        return replace(nothing_known("s"), replicas=tuple(self.replicas.values()))

    def replace_lost(self, name: str, engine: Any) -> str:
        if self.refuses:
            self.refuses -= 1
            raise RuntimeError("it is no engine")
        self.replicas[name] = replace(self.replicas[name], replaced_by=engine)
        return str(engine)


class Factory:
    """Makes "e1", "e2", ...; waits at ``gate`` if there is one, and raises the first ``failures`` times."""

    def __init__(self, failures: int = 0, gate: threading.Event | None = None) -> None:
        self.calls, self.failures, self.gate = 0, failures, gate
        self.reached = threading.Event()

    def __call__(self) -> str:
        self.calls += 1
        self.reached.set()
        assert self.gate is None or self.gate.wait(LIMIT_S)
        if self.calls <= self.failures:
            raise RuntimeError("no room")
        return f"e{self.calls}"


def lost(name: str) -> ReplicaStatus:
    return replace(replica(name, "RETIRED"), lost=True)


def settled() -> None:
    """Wait until the thread that makes engines, if there is one, has ended."""
    for thread in threading.enumerate():
        if thread.name == "rws-engine-factory":
            thread.join(LIMIT_S)
            assert not thread.is_alive()


def test_what_was_lost_is_replaced_once_however_often_it_is_told_and_on_another_thread() -> None:
    session, gate = Session(replica("r0"), lost("r1"), lost("r2")), threading.Event()
    factory = Factory(gate=gate)
    replacer = Replacer(session, factory, owns_made=False, max_attempts=3, retry_s=0)
    for _ in range(3):
        replacer.on_status(session.status())  # returns while the factory waits
    assert factory.reached.wait(LIMIT_S)
    gate.set()
    settled()
    replacer.on_status(session.status())
    settled()
    assert factory.calls == 2
    assert [session.replicas[name].replaced_by for name in ("r1", "r2")] == ["e1", "e2"]


def test_what_left_by_itself_or_to_another_session_is_not_replaced() -> None:
    session, factory = Session(replica("r0", "RETIRED"), replace(replica("r1", "RETIRED"), taken_by="other"), replica("r2")), Factory()
    Replacer(session, factory, owns_made=False, max_attempts=3, retry_s=0).on_status(session.status())
    settled()
    assert factory.calls == 0


@pytest.mark.parametrize(("failures", "refuses", "calls"), [(1, 0, 2), (0, 2, 3), (99, 0, 3), (1, 99, 3)])
def test_a_factory_or_an_engine_that_fails_is_tried_again_but_not_for_ever(
    failures: int, refuses: int, calls: int, caplog: pytest.LogCaptureFixture
) -> None:
    session, factory = Session(lost("r1")), Factory(failures)
    session.refuses = refuses
    replacer = Replacer(session, factory, owns_made=False, max_attempts=3, retry_s=0)
    for _ in range(5):
        replacer.on_status(session.status())
        settled()
    assert factory.calls == calls
    assert "r1 was lost, and attempt 1 to replace it failed" in caplog.text


def test_a_closed_session_makes_no_more_engines_and_one_without_a_factory_says_what_is_missing() -> None:
    session, factory = Session(lost("r1")), Factory()
    replacer = Replacer(session, factory, owns_made=False, max_attempts=3, retry_s=0)
    replacer.close()
    replacer.on_status(session.status())
    settled()
    assert factory.calls == 0
    with pytest.raises(ConfigError, match="engine_factory"):
        Replacer(session, None, owns_made=False, max_attempts=1, retry_s=0).make(1)
    with pytest.raises(ConfigError, match="count"):
        replacer.make(0)


def test_one_that_is_lost_while_the_last_look_finds_nobody_is_replaced_all_the_same() -> None:
    session, factory = Session(lost("r1")), Factory()
    replacer = Replacer(session, factory, owns_made=False, max_attempts=3, retry_s=0)
    status, looks = session.status, []

    def looked() -> FleetStatus:
        found = status()
        looks.append(found)
        if len(looks) == 2:  # nobody is left to be replaced; then one is lost, and told of, before the thread has ended
            session.replicas["r2"] = lost("r2")
            replacer.on_status(status())
        return found

    session.status = looked  # type: ignore[method-assign]
    replacer.on_status(status())
    settled()
    assert factory.calls == 2
    assert session.replicas["r2"].replaced_by == "e2"


@pytest.mark.parametrize(("silent", "replaced"), [(2, True), (3, False)])
def test_a_coordinator_that_does_not_answer_at_once_is_asked_again_but_not_for_ever(silent: int, replaced: bool) -> None:
    session, factory = Session(lost("r1")), Factory()
    status, asked = session.status, []

    def answered_late() -> FleetStatus:
        asked.append(None)
        if len(asked) <= silent:
            raise WeightSyncError("The coordinator did not answer; what holds now is not known here.")
        return status()

    session.status = answered_late  # type: ignore[method-assign]
    Replacer(session, factory, owns_made=False, max_attempts=3, retry_s=0).on_status(status())
    settled()
    assert (session.replicas["r1"].replaced_by == "e1") is replaced


def test_engines_that_are_made_when_the_session_closes_are_the_last() -> None:
    session, gate = Session(lost("r1"), lost("r2")), threading.Event()
    factory = Factory(gate=gate)
    replacer = Replacer(session, factory, owns_made=False, max_attempts=3, retry_s=0)
    replacer.on_status(session.status())
    assert factory.reached.wait(LIMIT_S)
    replacer.close()
    gate.set()
    settled()
    assert factory.calls == 1


def killed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The engines that are ended from now on; all that there are count as actors."""
    ended: list[Any] = []
    monkeypatch.setattr(module, "is_handle", lambda engine: True)
    monkeypatch.setattr(module.ray, "kill", ended.append)
    return ended


@pytest.mark.parametrize(("owns_made", "ended"), [(True, ["e1", "e2"]), (False, [])])
def test_of_engines_that_cannot_all_be_made_none_of_the_session_s_is_left(
    owns_made: bool, ended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    were_ended, factory = killed(monkeypatch), Factory()

    def third_fails() -> str:
        if factory.calls == 2:
            raise RuntimeError("no room")
        return factory()

    replacer = Replacer(Session(), third_fails, owns_made=owns_made, max_attempts=1, retry_s=0)
    with pytest.raises(RuntimeError, match="no room"):
        replacer.make(3)
    assert were_ended == ended


def test_engines_that_joined_a_session_which_was_closed_meanwhile_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = killed(monkeypatch)
    replacer = Replacer(Session(), Factory(), owns_made=True, max_attempts=1, retry_s=0)
    replacer.close()
    replacer.made({"r1": "e1"})
    assert ended == ["e1"]
