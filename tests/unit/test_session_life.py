"""Joins from several threads of one process."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from ray_weightsync.config import Timeouts
from ray_weightsync.engines.ref import EngineRef
from ray_weightsync.follower import nothing_known
from ray_weightsync.report import FleetStatus
from ray_weightsync.session_life import FleetLife
from tests.unit.test_view import replica

LIMIT_S = 10


def server(port: int) -> str:
    return f"http://127.0.0.1:{port}"


class Life(FleetLife):
    """A session whose coordinator lets nobody in before ``gate`` is open, and refuses everybody who ``fails``."""

    def __init__(self) -> None:
        super().__init__()
        self._link: Any = self
        self._settings: Any = type("Settings", (), {"timeouts": Timeouts()})
        self._keys, self._targets = (), {"r0": "engine"}
        self.gate, self.asked, self.fails = threading.Event(), threading.Semaphore(0), False

    def status(self) -> FleetStatus:
        return replace(nothing_known("s"), replicas=(replica("r0"),))

    def _require_open(self) -> None: ...

    def ask(self, method: str, *args: Any, **limits: Any) -> Any:
        self.asked.release()
        assert self.gate.wait(LIMIT_S)
        if self.fails:
            raise RuntimeError("refused")
        return str(args[1].id) if method == "replace" else tuple(str(ref.id) for ref in args[0])


def test_engines_that_join_at_once_are_given_different_ids() -> None:
    life, ids = Life(), []
    threads = [
        threading.Thread(target=lambda: ids.extend(life.add([server(1), server(2)])), daemon=True),
        threading.Thread(target=lambda: ids.append(life.replace_lost("r0", server(3))), daemon=True),
    ]
    for thread in threads:
        thread.start()
        assert life.asked.acquire(timeout=LIMIT_S)  # it waits to be let in
    life.gate.set()
    for thread in threads:
        thread.join(LIMIT_S)
    assert sorted(ids) == ["r1", "r2", "r3"] == sorted(life._targets)


def test_an_id_under_which_nobody_was_let_in_is_free_again() -> None:
    life = Life()
    life.fails = True
    life.gate.set()
    with pytest.raises(RuntimeError, match="refused"):
        life.add(EngineRef(server(1), id="mine"))
    life.fails = False
    assert life.add(EngineRef(server(1), id="mine")) == ("mine",)
