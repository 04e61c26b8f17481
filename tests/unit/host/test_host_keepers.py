"""A store that nobody wants any more ends itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ray_weightsync.transports.host import actor as module
from ray_weightsync.transports.host.actor import Keepers, SnapshotStoreActor


def test_a_store_that_cannot_be_closed_in_order_ends_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    monkeypatch.setattr(module, "WATCH_EVERY_S", 0)
    monkeypatch.setattr(module.ray, "get_runtime_context", lambda: SimpleNamespace(current_actor="me"))
    monkeypatch.setattr(module.ray, "kill", ended.append)

    def fails() -> None:
        raise OSError("the directory is gone")

    store: Any = SnapshotStoreActor()
    gone = SimpleNamespace(is_gone=True)
    store._keepers, store._store = Keepers(coordinator=gone, owner=gone), SimpleNamespace(close=fails)
    with pytest.raises(OSError, match="the directory is gone"):
        store._watch()
    assert ended == ["me"]
