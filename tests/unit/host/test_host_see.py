"""The proof that a worker sees the memory and the locks of a store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ray_weightsync.transports.host.layout import SlotError
from ray_weightsync.transports.host.receiver import HostReceiver
from ray_weightsync.transports.host.store import SnapshotStore


def test_a_worker_that_sees_the_stores_memory_and_locks_proves_it(store: SnapshotStore) -> None:
    fds = sorted(os.listdir("/proc/self/fd"))
    HostReceiver().see(store.probe())
    HostReceiver().see(store.probe())
    assert sorted(os.listdir("/proc/self/fd")) == fds


def test_a_worker_elsewhere_is_told_where_and_what_to_do(store: SnapshotStore, directory: str) -> None:
    os.mkdir(f"{directory}/other", 0o700)
    with pytest.raises(FileNotFoundError, match=rf"another node.*--ipc=host.*{directory}/other"):
        HostReceiver().see({**store.probe(), "directory": f"{directory}/other"})
    with pytest.raises(FileNotFoundError):
        HostReceiver().see({**store.probe(), "directory": f"{directory}/nowhere"})


def test_a_file_of_the_same_name_with_another_nonce_is_not_the_stores(store: SnapshotStore) -> None:
    with pytest.raises(SlotError, match="is another store's: the nonce"):
        HostReceiver().see({**store.probe(), "nonce": "0" * 32})


def test_a_nonce_without_its_stores_lock_is_no_proof(store: SnapshotStore, directory: str) -> None:
    probe = store.probe()
    path = Path(f"{directory}/{probe['name']}")
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(OSError, match="but not the lock that its store holds"):
        HostReceiver().see(probe)


@pytest.mark.parametrize("mode", [0o644, 0o666])
def test_a_probe_that_others_could_have_written_is_refused(store: SnapshotStore, directory: str, mode: int) -> None:
    probe = store.probe()
    os.chmod(f"{directory}/{probe['name']}", mode)
    with pytest.raises(SlotError, match="mode"):
        HostReceiver().see(probe)


def test_another_users_probe_says_so(store: SnapshotStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(SlotError, match="another user's file"):
        HostReceiver().see(store.probe())


@pytest.mark.parametrize(
    ("field", "value"),
    [("name", "rws-abcd1234-7"), ("name", "../etc/passwd"), ("name", None), ("directory", "shm"), ("nonce", ""), ("nonce", 3)],
)
def test_a_malformed_probe_is_refused_before_anything_is_opened(store: SnapshotStore, field: str, value: Any) -> None:
    with pytest.raises(SlotError, match=r"name|directory|snapshot|nonce"):
        HostReceiver().see({**store.probe(), field: value})
    with pytest.raises(SlotError, match="a probe has the fields"):
        HostReceiver().see({key: each for key, each in store.probe().items() if key != field})
