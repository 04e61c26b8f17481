"""What a process says of the device that it computes on. What a GPU says is in `tests/gpu/test_gpu_choosing.py`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from ray_weightsync.worker.device import has_nccl, told_device
from ray_weightsync.worker.identity import is_installed
from ray_weightsync.worker.seams import SoleRank
from ray_weightsync.worker.updates import WorkerUpdates


def test_only_a_gpu_has_an_identity() -> None:
    assert told_device(torch.device("cpu")) == {"type": "cpu", "uuid": None}
    assert told_device(torch.device("meta")) == {"type": "meta", "uuid": None}


def test_a_device_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"uuid-{index}"))
    assert told_device(torch.device("cuda")) == {"type": "cuda", "uuid": "uuid-1"}
    assert told_device(torch.device("cuda", 0)) == {"type": "cuda", "uuid": "uuid-0"}


def test_a_torch_that_knows_no_identity_tells_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(name="GPU"))
    assert told_device(torch.device("cuda", 0)) == {"type": "cuda", "uuid": None}


def test_what_is_installed_is_found_without_being_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_installed("this")  # it would print when imported
    assert not is_installed("no_such_module_anywhere")
    assert not is_installed("no_such_module_anywhere.below")


class TestNccl:
    """Whether nccl4py can be used, with a stand-in for it: `nccl.core` tells the version of the libnccl that it has loaded."""

    @pytest.fixture(autouse=True)
    def anew(self) -> Iterator[None]:
        has_nccl.cache_clear()
        yield
        has_nccl.cache_clear()

    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """How often its version was asked for."""
        return []

    @pytest.fixture
    def install(self, monkeypatch: pytest.MonkeyPatch, asked: list[str]) -> Callable[[Any], None]:
        def there(libnccl: Any) -> None:
            def get_version() -> Any:
                asked.append("version")
                if isinstance(libnccl, Exception):
                    raise libnccl
                return SimpleNamespace(libnccl=libnccl)

            package: Any = ModuleType("nccl")
            package.__spec__ = ModuleSpec("nccl", None)
            core: Any = ModuleType("nccl.core")
            core.get_version = get_version
            monkeypatch.setitem(sys.modules, "nccl", package)
            monkeypatch.setitem(sys.modules, "nccl.core", core)

        return there

    @pytest.mark.parametrize("release", [(2, 23), (2, 23, 4), (3, 0, 0)])
    def test_a_library_that_is_new_enough_is_found_once_and_nothing_is_said(
        self, install: Callable[[Any], None], asked: list[str], caplog: pytest.LogCaptureFixture, release: tuple[int, ...]
    ) -> None:
        install(SimpleNamespace(version=SimpleNamespace(release=release)))
        assert [has_nccl(), has_nccl()] == [True, True]
        assert asked == ["version"]
        assert not caplog.records

    def test_a_release_that_tells_its_version_in_another_way_is_used(self, install: Callable[[Any], None]) -> None:
        install("2.30.4")
        assert has_nccl()

    @pytest.mark.parametrize(
        ("libnccl", "why"),
        [
            (None, "finds no libnccl"),
            (ImportError("cannot import name 'bindings' from 'cuda'"), "ImportError: cannot import name 'bindings'"),
            (OSError("libcudart.so.13: cannot open"), "libcudart"),
            (SimpleNamespace(version=SimpleNamespace(release=(2, 21, 5))), "needs 2.23 or later"),
        ],
    )
    def test_one_that_is_installed_and_does_not_work_is_none_and_is_told_once(
        self, install: Callable[[Any], None], caplog: pytest.LogCaptureFixture, libnccl: Any, why: str
    ) -> None:
        install(libnccl)
        with caplog.at_level(logging.WARNING, logger="ray_weightsync"):
            assert [has_nccl(), has_nccl()] == [False, False]
        (record,) = caplog.records
        assert why in record.getMessage()

    def test_where_it_is_not_installed_nothing_is_said(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        assert not has_nccl()
        assert not caplog.records

    def test_a_worker_without_a_gpu_does_not_load_it(self, install: Callable[[Any], None], asked: list[str]) -> None:
        install(SimpleNamespace(version=SimpleNamespace(release=(2, 30))))
        model: Any = None
        assert WorkerUpdates(model, SoleRank(), {}).describe("n")["nccl"] is False
        assert asked == []
