"""A trainer in a process of its own, whose vLLM has no GPU: our sender, and vLLM's own trainer engine. And engines for them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import ray
import torch

from ray_weightsync.protocol.ray_client import RayVLLMWeightSyncClient
from ray_weightsync.transports.collective.stock import StockSender
from ray_weightsync.transports.collective.stock_format import StockFormat
from ray_weightsync.transports.collective.stock_meeting import oldest_release
from ray_weightsync.weights.plan import Plan
from ray_weightsync.weights.sources import StateDictSource
from tests.vllm import support
from tests.vllm.holder import Holder

EXTENSION = "tests.vllm.nccl_on_gloo.Extension"


class StockEngine(Holder):
    """An actor with the four verbs of vLLM's protocol, as vLLM's own examples have them."""

    def vllm_version(self) -> str:
        from vllm import __version__

        return str(__version__)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.vllm_config = self.llm.vllm_config

    async def init_weight_transfer_engine(self, request: Any) -> None:
        await self.llm.init_weight_transfer_engine(request)

    async def start_weight_update(self) -> None:
        await self.llm.start_weight_update()

    async def update_weights(self, request: Any) -> None:
        await self.llm.update_weights(request)

    async def finish_weight_update(self) -> None:
        await self.llm.finish_weight_update()


def start_stock_engine(model: str, tensor_parallel_size: int) -> Any:
    """A handle to an engine on vLLM's own ``nccl`` backend, which is starting."""
    env = {"env_vars": support.engine_env(tensor_parallel_size)}
    actor = ray.remote(StockEngine).options(num_cpus=0, runtime_env=env, max_concurrency=100)
    return actor.remote(model, tensor_parallel_size, extension=EXTENSION, weight_transfer_config={"backend": "nccl"})


class Trainer:
    """Rank 0. Its methods run on several threads."""

    def __init__(self) -> None:
        from tests.vllm import nccl_on_gloo

        nccl_on_gloo.stand_in_for_the_trainer()
        self._reached, self._released = threading.Event(), threading.Event()

    def open(self, world_size: int, form: StockFormat, vllm: tuple[int, int] | None = None) -> None:
        self._sender = StockSender(form, world_size=world_size, vllm=vllm, address="127.0.0.1", device=torch.device("cpu"))

    def oldest_release(self, versions: list[str | None]) -> tuple[int, int] | None:
        """Of the engines' vLLM and this process's own."""
        from vllm import __version__

        return oldest_release([*versions, __version__])

    def init_info(self, **ranks: int) -> dict[str, Any]:
        return self._sender.init_info(**ranks)

    def join(self, limit_s: float) -> None:
        self._sender.join(limit_s=limit_s)

    def send(self, checkpoint: str, limit_s: float) -> str:
        """The digest of what was sent."""
        source, plan = _source(checkpoint)
        return self._sender.send(source, plan, limit_s=limit_s).digest

    def send_and_fail(self, checkpoint: str, after: int, limit_s: float) -> None:
        """Fail with a `ZeroDivisionError` after so many tensors."""
        source, plan = _source(checkpoint)

        def failing() -> Iterator[tuple[str, torch.Tensor]]:
            for number, pair in enumerate(source):
                if number == after:
                    raise ZeroDivisionError("the optimizer is broken")
                yield pair

        self._sender.send(failing(), plan, limit_s=limit_s)

    def send_and_wait(self, checkpoint: str, after: int, limit_s: float) -> None:
        """Wait for `release` after so many tensors."""
        source, plan = _source(checkpoint)

        def waiting() -> Iterator[tuple[str, torch.Tensor]]:
            for number, pair in enumerate(source):
                if number == after:
                    self._reached.set()
                    if not self._released.wait(support.CALL_LIMIT_S):
                        raise TimeoutError("nobody released the source")
                yield pair

        self._sender.send(waiting(), plan, limit_s=limit_s)

    def wait_reached(self) -> bool:
        return self._reached.wait(support.CALL_LIMIT_S)

    def release(self) -> None:
        self._released.set()

    def close(self) -> None:
        self._sender.close()

    def open_vllms(self, handles: list[Any], checkpoint: str, world_size: int, packed_buffer_size_bytes: int) -> None:
        """vLLM's own trainer engine makes a group through our client; unpacked for a size of 0."""
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

        client = RayVLLMWeightSyncClient(handles, timeout=support.CALL_LIMIT_S)
        with _reserved_port() as port:
            init_info = NCCLTrainerInitInfo(
                rank=0,
                master_address="127.0.0.1",
                master_port=port,
                world_size=world_size,
                packed=packed_buffer_size_bytes > 0,
                packed_buffer_size_bytes=packed_buffer_size_bytes,
            )
            self._vllms = NCCLTrainerWeightTransferEngine.trainer_init(init_info, client=client, source=_source(checkpoint)[0])

    def send_vllms(self, checkpoint: str) -> None:
        """A whole session through our client."""
        self._vllms.source = _source(checkpoint)[0]
        self._vllms.send_weights()

    def close_vllms(self) -> None:
        self._vllms.shutdown()


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """A port that is nobody else's. vLLM's trainer binds it itself: bound twice with SO_REUSEADDR, but not listened on, it lets it."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


def _source(checkpoint: str) -> tuple[StateDictSource, Plan]:
    source = StateDictSource(support.checkpoint(checkpoint))
    return source, Plan.from_metadata(source.metadata())


def start_trainer() -> Any:
    """A handle to a `Trainer` that is starting."""
    env = {"env_vars": {"PYTHONPATH": support.REPOSITORY, "VLLM_LOGGING_LEVEL": "ERROR"}}
    return ray.remote(Trainer).options(num_cpus=0, runtime_env=env, max_concurrency=4).remote()
