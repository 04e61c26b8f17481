"""What is checked before a file is believed, by both ends alike."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ray_weightsync.transports.host.files import open_directory, open_slot_file
from ray_weightsync.transports.host.layout import HEADER_BYTES, SlotError
from ray_weightsync.transports.host.store import SnapshotStore


def test_a_directory_is_reached_through_no_link(directory: str) -> None:
    os.mkdir(f"{directory}/real")
    os.mkdir(f"{directory}/real/inner")
    os.symlink(f"{directory}/real", f"{directory}/link")
    Path(f"{directory}/file").touch()
    for bad in (f"{directory}/link", f"{directory}/file"):
        with pytest.raises(SlotError, match="is a link or no directory"):
            open_directory(bad)
    with pytest.raises(SlotError, match=f"name {directory}/real/inner instead"):
        open_directory(f"{directory}/link/inner")
    with pytest.raises(FileNotFoundError):
        open_directory(f"{directory}/nowhere")


def readers() -> list[Any]:
    return [pytest.param(writable, id="writer" if writable else "receiver") for writable in (False, True)]


@pytest.mark.parametrize("writable", readers())
class TestFile:
    """Both ends open files in the same way."""

    @pytest.fixture
    def address(self, store: SnapshotStore, stage: Any) -> dict[str, Any]:
        return dict(store.address(stage.committed(store)))

    @staticmethod
    def refused(address: dict[str, Any], writable: bool, match: str) -> None:
        fds = set(os.listdir("/proc/self/fd"))
        with pytest.raises(SlotError, match=match):
            open_slot_file(address, writable=writable)  # type: ignore[arg-type]
        assert set(os.listdir("/proc/self/fd")) == fds

    @staticmethod
    def path(address: dict[str, Any]) -> str:
        return f"{address['directory']}/{address['name']}"

    @pytest.mark.parametrize("mode", [0o644, 0o660, 0o400, 0o700, 0o4600])
    def test_another_mode_is_refused(self, address: dict[str, Any], writable: bool, mode: int) -> None:
        os.chmod(self.path(address), mode)
        if writable and not mode & 0o200 and os.geteuid() != 0:
            with pytest.raises(PermissionError, match="run as one user"):
                open_slot_file(address, writable=True)  # type: ignore[arg-type]
            return
        self.refused(address, writable, "mode")

    def test_another_users_file_is_refused(self, address: dict[str, Any], writable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        self.refused(address, writable, "another user's file")

    def test_a_symbolic_link_is_refused(self, address: dict[str, Any], writable: bool) -> None:
        os.rename(self.path(address), f"{address['directory']}/elsewhere")
        os.symlink("elsewhere", self.path(address))
        self.refused(address, writable, "is a symbolic link")

    def test_a_second_name_is_refused(self, address: dict[str, Any], writable: bool) -> None:
        os.link(self.path(address), f"{address['directory']}/second")
        self.refused(address, writable, "has 2 names")

    def test_a_fifo_is_refused_and_blocks_nobody(self, address: dict[str, Any], writable: bool) -> None:
        os.unlink(self.path(address))
        os.mkfifo(self.path(address), 0o600)
        self.refused(address, writable, "not a regular file")

    @pytest.mark.parametrize("change", [-1, 1, -HEADER_BYTES, 4096])
    def test_another_size_is_refused(self, address: dict[str, Any], writable: bool, change: int) -> None:
        os.truncate(self.path(address), HEADER_BYTES + address["num_bytes"] + change)
        self.refused(address, writable, f"has {HEADER_BYTES + address['num_bytes'] + change} bytes")

    def test_an_absent_file_says_what_may_be_wrong(self, address: dict[str, Any], writable: bool) -> None:
        with pytest.raises(FileNotFoundError, match=r"another node.*--ipc=host"):
            open_slot_file({**address, "name": "rws-abcd1234-0"}, writable=writable)  # type: ignore[typeddict-item]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_process_of_another_user_is_told_so(store: SnapshotStore, stage: Any, directory: str) -> None:
    address = store.address(stage.committed(store))
    os.chmod(directory, 0o755)
    os.seteuid(65534)
    try:
        with pytest.raises(PermissionError, match=r"must run as one user on a node; this process runs as user 65534"):
            open_slot_file(address, writable=False)
    finally:
        os.seteuid(0)
