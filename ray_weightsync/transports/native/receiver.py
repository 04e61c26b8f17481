"""An engine worker's end: vLLM's own worker backend is made, kept between rounds, and given sessions under guard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ray_weightsync.transports.native.backends import traits
from ray_weightsync.transports.native.factory import Backends, WorkerBackend
from ray_weightsync.transports.native.guard import Guard, GuardedModel
from ray_weightsync.weights.plan import Plan
from ray_weightsync.worker import payload
from ray_weightsync.worker.receiver import Delivery


class NativeReceiver:
    """A `Receiver` that is a `ray_weightsync.worker.course.Delegate`: its bytes come in sessions of its own, never in one of ours.

    Args:
        backends: Where vLLM's backends are had from.
        model: The worker's model, which they load into.
        into: The guarded way into it.
        rank_in_replica: Tells the worker's place among all workers of its replica, from 0.
    """

    def __init__(self, backends: Backends, model: Any, into: GuardedModel, rank_in_replica: Callable[[], int]) -> None:
        self._backends = backends
        self._model = model
        self._into = into
        self._rank_in_replica = rank_in_replica
        self._name = ""
        self._backend: WorkerBackend | None = None
        self._init_info: Any = None

    def see(self, probe: Mapping[str, Any]) -> None:
        """Raise unless vLLM has the backend that ``probe["backend"]`` names in this worker.

        Raises:
            ValueError, ImportError: see `VLLMBackends.require`.
        """
        self._backends.require(payload.text(probe, "backend"))

    def open(self, plan: Plan, update: Mapping[str, Any]) -> Delivery:
        """Never opens anything.

        Raises:
            ValueError: always: the session was begun as one of ours.
        """
        raise ValueError("op 'native' did not come before start_weight_update, so this session is not a backend's of vLLM")

    def prepare(self, info: Mapping[str, Any]) -> None:
        """Shut down the backend of before, and make a new one, unless ``info["init_info"]`` is None.

        Raises:
            ValueError: if there is none to be used again, or vLLM has none of that name, or it does not understand its init info.
            Exception: whatever its constructor raises.
        """
        name = payload.text(info, "backend")
        if info.get("init_info") is None:
            if self._backend is None or self._name != name:
                kept = f"this worker keeps a backend {self._name!r}" if self._backend is not None else "this worker keeps none"
                raise ValueError(f"backend {name!r} was to be used again, but {kept}; send its init_info")
            return
        self.close()
        init_info = dict(payload.mapping(info, "init_info"))
        self._name, self._backend = name, self._backends.make(name)
        try:
            self._init_info = self._backend.parse_init_info(init_info)
        except BaseException:
            self.close()
            raise

    def join(self) -> None:
        """Hand a new backend its init info, with which it may meet the trainer; it blocks as vLLM's does.

        Raises:
            Exception: whatever it raises; it is shut down then.
        """
        init_info, self._init_info = self._init_info, None
        if init_info is None:
            return
        assert self._backend is not None
        try:
            self._backend.init_transfer_engine(init_info)
            self._into.reload.require_clean()  # some try out the model's loaders here
        except BaseException:
            try:
                self.close()
            finally:
                self._into.reload.clear()
            raise

    def course(self) -> Guard:
        """The guarded session of the backend."""
        assert self._backend is not None
        return Guard(self._backend, traits(self._name), self._model, self._into, self._rank_in_replica)

    def close(self) -> None:
        """Shut the backend down, if there is one. Idempotent."""
        backend, self._backend, self._init_info = self._backend, None, None
        if backend is not None:
            backend.shutdown()
