"""An engine on one of vLLM's own backends, of this process: it takes raw payloads, proves nothing, and fails as vLLM does."""

from __future__ import annotations

from typing import Any

from ray_weightsync.protocol.channel import FINISH, INIT, SHUTDOWN, START, UPDATE
from tests.unit.fleet.fake_engine import FakeEngine


class StockEngine(FakeEngine):
    """A `FakeEngine` without our worker side.

    Attributes:
        backend: Its backend.
        num_workers: Its workers.
        infos: What it was given to join.
        updates: What it was given to receive.
    """

    def __init__(self, label: str, *, backend: str = "nccl", num_workers: int = 1) -> None:
        super().__init__(label)
        self.backend = backend
        self.num_workers = num_workers
        self.infos: list[Any] = []
        self.updates: list[Any] = []
        self.leftovers = False
        self.can_shut_down = True

    def supports(self, verb: str) -> bool:
        return self.can_shut_down if verb == SHUTDOWN else super().supports(verb)

    def _name(self, verb: str, args: tuple[Any, ...]) -> str:
        return {INIT: "init", SHUTDOWN: "shutdown"}.get(verb) or super()._name(verb, args)

    async def call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super().call(verb, *args, **kwargs)
        except RuntimeError:
            if verb == UPDATE:  # vLLM closes an update that fails, and keeps what was loaded
                self.update_open, self.leftovers = False, True
            raise

    def _do(self, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if verb == INIT:
            self.infos.append(args[0])
        elif verb == SHUTDOWN:
            self.infos.clear()
        elif verb == START:
            if self.update_open:
                raise RuntimeError("start_weight_update called while a weight update is already active")
            super()._do(verb, args, kwargs)
        elif verb == UPDATE:
            if not self.update_open:
                raise RuntimeError("start_weight_update must be called before update_weights")
            if self.leftovers:
                raise RuntimeError("'Parameter' object has no attribute 'weight_loader'")
            self.updates.append(args[0])
        elif verb == FINISH:
            if not self.update_open:
                raise RuntimeError("finish_weight_update called without a matching start_weight_update")
            self.update_open, self.leftovers = False, False
        else:
            return super()._do(verb, args, kwargs)
        return None

    def _told(self, nonce: str) -> dict[str, Any]:
        sizes = {"num_workers": self.num_workers, "tensor_parallel_size": self.num_workers}
        return super()._told(nonce) | {"backend": self.backend, "workers": None} | sizes
