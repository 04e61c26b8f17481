"""A trainer in a process of its own: with vLLM's own ``nccl`` trainer engine over gloo, and under ``ipc`` one that sends files."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import ray
import torch

import ray_weightsync as rws
from tests.vllm import support

AT_ONCE = 7
"""Tensors in one update."""


class Switching:
    """The weights of one checkpoint after the other. It can stop in the middle until it is let go on."""

    def __init__(self) -> None:
        self.pairs: support.Pairs = {}
        self.stops_after: int | None = None
        self.stopped, self.goes_on = threading.Event(), threading.Event()

    def metadata(self) -> Any:
        return rws.StateDictSource(self.pairs).metadata()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, pair in enumerate(self.pairs.items()):
            if number == self.stops_after:
                self.stopped.set()
                if not self.goes_on.wait(support.CALL_LIMIT_S):
                    raise TimeoutError("nobody let the source go on")
            yield pair


class Trainer:
    """Joins one session after the other. Its methods run on several threads."""

    def __init__(self) -> None:
        from tests.vllm import nccl_on_gloo

        nccl_on_gloo.stand_in_for_the_trainer()
        self._made = send_files_as_ipc()

    def join(self, session: str) -> None:
        self._made.clear()
        self._source = Switching()
        self._sender = rws.WeightSender(session, self._source)

    def send(self, checkpoint: str, version: str, stops_after: int | None = None) -> rws.SyncReport:
        self._source.pairs, self._source.stops_after = support.checkpoint(checkpoint), stops_after
        return self._sender.send_weights(version=version)

    def wait_stopped(self) -> bool:
        return self._source.stopped.wait(support.CALL_LIMIT_S)

    def go_on(self) -> None:
        self._source.goes_on.set()

    def made(self) -> int:
        """How many trainer engines were made for this session that send files."""
        return len(self._made)

    def leave(self) -> None:
        self._sender.close()


def send_files_as_ipc() -> list[Any]:
    """Register, as ``ipc``, a trainer engine for `tests.vllm.native_backends.FromFile`. Returns those that will be made."""
    from safetensors.torch import save_file
    from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    made: list[Any] = []

    @dataclass
    class InitInfo(TrainerInitInfo):  # type: ignore[misc]  # vLLM is not typed for us
        backend: ClassVar[str] = "ipc"
        at_once: int = AT_ONCE

    class ByFile(TrainerWeightTransferEngine[InitInfo]):  # type: ignore[misc]
        init_info_cls = InitInfo
        at_once = AT_ONCE

        @classmethod
        def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Any:
            engine = cls(client=client, source=source, is_sender=init_info.is_sender)
            engine.at_once = init_info.at_once
            client.init_weight_transfer_engine({"refuse_on": []})
            made.append(engine)
            return engine

        def send_weights(self) -> None:
            self.client.start_weight_update()
            batch: dict[str, torch.Tensor] = {}
            with tempfile.TemporaryDirectory() as directory:
                for name, tensor in self.source:
                    batch[name] = tensor.contiguous()
                    if len(batch) == self.at_once:
                        self._send(directory, batch)
                        batch = {}
                if batch:
                    self._send(directory, batch)
            self.client.finish_weight_update()

        def _send(self, directory: str, batch: dict[str, torch.Tensor]) -> None:
            path = Path(directory, "weights.safetensors")
            save_file(batch, path)
            # As handles of CUDA IPC, which an engine core would not be given as they are.
            handles = [(torch.Tensor, torch.storage.TypedStorage, each.dtype, b"handle") for each in batch.values()]
            self.client.update_weights({"path": str(path), "names": list(batch), "handles": handles})

    WeightTransferTrainerFactory._registry["ipc"] = lambda: ByFile
    return made


def start_trainer() -> Any:
    """A handle to a `Trainer` that is starting."""
    env = {"env_vars": {"PYTHONPATH": support.REPOSITORY, "VLLM_LOGGING_LEVEL": "ERROR"}}
    return ray.remote(Trainer).options(num_cpus=0, runtime_env=env, max_concurrency=4).remote()
