"""vLLM's own protocol accepts our clients. Importing it costs 17 s, hence a file of its own; skipped where vLLM is missing."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

from ray_weightsync.protocol.client import VLLMWeightSyncClient
from ray_weightsync.protocol.http_client import HTTPVLLMWeightSyncClient
from ray_weightsync.protocol.ray_client import RayVLLMWeightSyncClient

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")


@pytest.fixture(scope="module")
def base() -> Any:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own imports
        from vllm.distributed.weight_transfer import base

    return base


def test_our_clients_are_clients_to_vllm_and_its_clients_are_to_us(base: Any) -> None:
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient as TheirHTTPClient

    assert isinstance(HTTPVLLMWeightSyncClient("http://127.0.0.1:8000"), base.VLLMWeightSyncClient)
    # Made without its __init__, which wants a live actor: the protocol is structural.
    assert isinstance(RayVLLMWeightSyncClient.__new__(RayVLLMWeightSyncClient), base.VLLMWeightSyncClient)
    assert isinstance(TheirHTTPClient("http://127.0.0.1:8000"), VLLMWeightSyncClient)


def test_a_trainer_engine_of_vllms_drives_our_client(base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine

    sent: list[Any] = []

    class Recording(HTTPVLLMWeightSyncClient):
        def init_weight_transfer_engine(self, init_info: Any) -> None:
            sent.append(init_info)

    # What it asks of a GPU on its way to the client.
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="GPU-0"))
    source = base.ModuleSource(torch.nn.Linear(2, 2))
    client = Recording("http://127.0.0.1:8000")
    engine = IPCTrainerWeightTransferEngine.trainer_init(IPCTrainerInitInfo(rank=0), client=client, source=source)
    assert engine.client is client
    assert sent == [{"packed": False}]
