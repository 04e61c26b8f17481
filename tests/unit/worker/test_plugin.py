"""How the backend is registered, on a stand-in for vLLM's registry: importing the real one takes 17 s."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

PLUGIN = "ray_weightsync.engines.plugin"


class Registry:
    """As vLLM's factory: a name can be registered once."""

    def __init__(self) -> None:
        self.engines: dict[str, tuple[str, str]] = {}

    def register_engine(self, name: str, module: str, class_name: str) -> None:
        if name in self.engines:
            raise ValueError(f"Weight transfer engine {name!r} is already registered.")
        self.engines[name] = (module, class_name)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    made = Registry()
    for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    factory: Any = ModuleType("vllm.distributed.weight_transfer.factory")
    factory.WeightTransferEngineFactory = made
    monkeypatch.setitem(sys.modules, factory.__name__, factory)
    monkeypatch.delitem(sys.modules, PLUGIN, raising=False)
    return made


@pytest.fixture
def plugin(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = importlib.import_module(PLUGIN)
    monkeypatch.setitem(sys.modules, PLUGIN, module)
    return module


def test_importing_it_registers_the_backend_by_name_only(plugin: Any, registry: Registry) -> None:
    assert registry.engines == {"rws": ("ray_weightsync.engines.plugin_backend", "Backend")}
    assert "ray_weightsync.worker.backend" not in sys.modules


def test_the_entry_point_after_the_worker_extension_changes_nothing(plugin: Any, registry: Registry) -> None:
    plugin.register()
    assert len(registry.engines) == 1


def test_another_packages_backend_of_that_name_is_an_error(registry: Registry) -> None:
    registry.register_engine("rws", "somebody.elses", "Backend")
    with pytest.raises(ValueError, match="already registered"):
        importlib.import_module(PLUGIN)


def test_the_receivers_are_a_fixed_table(plugin: Any) -> None:
    assert list(plugin.receivers()) == ["host", "collective"]
    assert plugin.receivers()["host"] is not plugin.receivers()["host"]


class TestDescribe:
    def test_a_worker_with_the_backend_is_described_by_it(self, plugin: Any) -> None:
        worker = plugin.WorkerExtension()
        worker.weight_transfer_engine = SimpleNamespace(describe=lambda nonce: {"nonce": nonce, "rank": 3})
        assert worker.rws_describe("n") == {"nonce": "n", "rank": 3}

    @pytest.mark.parametrize("engine", [None, SimpleNamespace()], ids=["no backend", "another backend"])
    def test_a_worker_without_it_answers_all_the_same(self, plugin: Any, engine: Any) -> None:
        worker = plugin.WorkerExtension()
        worker.weight_transfer_engine = engine
        told = worker.rws_describe("n")
        assert told["nonce"] == "n"
        assert f"backend is {type(engine).__name__}, not 'rws'" in told["failure"]

    def test_it_does_not_raise(self, plugin: Any) -> None:
        def broken(nonce: str) -> None:
            raise RuntimeError("half built")

        worker = plugin.WorkerExtension()
        worker.weight_transfer_engine = SimpleNamespace(describe=broken)
        assert "cannot describe itself: RuntimeError: half built" in worker.rws_describe("n")["failure"]
