"""What is known of vLLM's backends."""

from __future__ import annotations

import pytest

from ray_weightsync.transports.native import backends
from ray_weightsync.transports.native.backends import BackendTraits, missing_module, traits


@pytest.mark.parametrize("name", ["ipc", "nccl"])
def test_a_backend_that_loads_through_load_weights_is_attested(name: str) -> None:
    assert traits(name).attested


@pytest.mark.parametrize("name", ["sparse_nccl", "sharded_rdt", "nccl_m2n"])
def test_a_backend_that_writes_into_parameters_itself_is_not_attested(name: str) -> None:
    assert not traits(name).attested


def test_only_one_to_one_backends_lose_one_replica_at_a_time() -> None:
    assert {name: traits(name).grouped for name in ("ipc", "sharded_rdt", "nccl", "sparse_nccl", "nccl_m2n")} == {
        "ipc": False,
        "sharded_rdt": False,
        "nccl": True,
        "sparse_nccl": True,
        "nccl_m2n": True,
    }


def test_only_patches_are_handed_to_send_weights() -> None:
    assert [name for name in ("ipc", "nccl", "sparse_nccl", "sharded_rdt", "nccl_m2n") if not traits(name).needs_source] == ["sparse_nccl"]


def test_nothing_is_assumed_of_a_backend_that_is_not_known() -> None:
    assert traits("somebodys") == BackendTraits(name="somebodys", attested=False, grouped=True, needs_source=True)


def test_what_vllms_own_end_needs_is_missed_before_it_is_made_and_of_another_end_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backends, "is_installed", lambda module: False)
    own, another = type("Own", (), {"__module__": "vllm.distributed.weight_transfer"}), type("Another", (), {})
    assert missing_module("nccl_m2n", own) == "nccl.m2n"
    assert missing_module("sharded_rdt", own) == "nixl"
    assert missing_module("nccl_m2n", another) is None
    assert missing_module("nccl", own) is None
    monkeypatch.setattr(backends, "is_installed", lambda module: True)
    assert missing_module("nccl_m2n", own) is None
