"""vLLM's own protocol accepts our clients. Importing it costs 17 s, hence a file of its own; skipped where vLLM is missing."""

from __future__ import annotations

import importlib.util
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


def test_a_trainer_engine_of_vllms_takes_our_client_and_calls_it_as_its_own(base: Any) -> None:
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine

    sent: list[Any] = []

    class Recording(HTTPVLLMWeightSyncClient):
        def init_weight_transfer_engine(self, init_info: Any) -> None:
            sent.append(init_info)

    assert issubclass(IPCTrainerWeightTransferEngine, base.TrainerWeightTransferEngine)
    del IPCTrainerInitInfo, Recording
