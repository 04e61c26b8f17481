"""What a worker says of itself without asking anybody."""

from __future__ import annotations

import ipaddress
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import ray

import ray_weightsync
from ray_weightsync.worker.identity import node_ip, package_version, resident


def allocator(monkeypatch: pytest.MonkeyPatch, module: str, name: str, data: list[Any] | None) -> None:
    """Put vLLM's sleep-mode allocator among the imported modules; None: imported, but never used."""
    found = ModuleType(module)
    instance = None if data is None else SimpleNamespace(pointer_to_data=dict(enumerate(data)))
    setattr(found, name, SimpleNamespace(instance=instance))
    monkeypatch.setitem(sys.modules, module, found)


CUDA = ("vllm.device_allocator.cumem", "CuMemAllocator")
XPU = ("vllm.device_allocator.xpumem", "XpuMemAllocator")


def block(tag: str, asleep: bool) -> SimpleNamespace:
    return SimpleNamespace(tag=tag, is_asleep=asleep)


class TestResident:
    def test_everything_is_where_sleep_mode_does_not_exist(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module, _ in (CUDA, XPU):
            monkeypatch.delitem(sys.modules, module, raising=False)
        assert resident() == ("weights", "kv_cache")

    def test_everything_is_where_sleep_mode_was_never_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        allocator(monkeypatch, *CUDA, None)
        assert resident() == ("weights", "kv_cache")

    @pytest.mark.parametrize("which", [CUDA, XPU], ids=["cuda", "xpu"])
    @pytest.mark.parametrize(
        ("weights_asleep", "cache_asleep", "told"),
        [
            (False, False, ("weights", "kv_cache")),
            (True, True, ()),
            (False, True, ("weights",)),
            (True, False, ("kv_cache",)),
        ],
    )
    def test_what_sleeps_is_not_told(
        self, monkeypatch: pytest.MonkeyPatch, which: tuple[str, str], weights_asleep: bool, cache_asleep: bool, told: tuple[str, ...]
    ) -> None:
        awake = [block("weights", False), block("kv_cache", False), block("runtime", True)]
        allocator(monkeypatch, *which, [*awake, block("weights", weights_asleep), block("kv_cache", cache_asleep)])
        assert resident() == told


def test_the_version_is_the_packages() -> None:
    assert package_version() == ray_weightsync.__version__


def test_the_address_is_one() -> None:
    assert ipaddress.ip_address(node_ip())


def test_in_a_cluster_of_rays_the_address_is_the_one_that_ray_has_for_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.9.8.7")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    assert node_ip() != "10.9.8.7"
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    assert node_ip() == "10.9.8.7"


def test_a_machine_without_a_network_is_its_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def unreachable(*args: Any) -> None:
        raise OSError("no route")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(socket.socket, "connect", unreachable)
    assert node_ip() == "127.0.0.1"
