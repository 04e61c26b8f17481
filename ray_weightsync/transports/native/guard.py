"""One session of one of vLLM's worker backends, under guard: whichever backend it is, and whatever goes wrong in it.

A backend has the real model, and does what it does without us. Around its *start* and *finish* the model is looked after as in a
session of ours: what was left open is flushed first, what is not whole is never completed, and a model that is not clean is an error.

Of a backend whose every byte goes through the model's ``load_weights`` (`BackendTraits.attested`) that method is ours while it
receives: names, shapes and dtypes are held against the plan, each tensor is digested before its loader sees it, tied weights are
compared. A failure there is not raised into the backend, which may be in the middle of a broadcast that others wait in: what is
still to come is received and dropped, and the failure is told afterwards.

The others write into parameters themselves. Of them only the session is attested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from ray_weightsync.transports.native.arrivals import Arrivals
from ray_weightsync.transports.native.backends import BackendTraits
from ray_weightsync.transports.native.factory import WorkerBackend
from ray_weightsync.transports.native.handles import require_handles
from ray_weightsync.transports.native.plain import from_plain
from ray_weightsync.weights.plan import Plan
from ray_weightsync.worker import payload
from ray_weightsync.worker.device import told_device
from ray_weightsync.worker.receiver import Received
from ray_weightsync.worker.ties import Seen

Pairs = Iterable[tuple[str, torch.Tensor]]


class Reload(Protocol):
    """What is used of `ray_weightsync.worker.reload.LayerwiseReload`."""

    def start(self, begin: Callable[[], None] | None = None) -> None: ...
    def clear(self) -> None: ...
    def finish(self, complete: Callable[[], None] | None = None, *, every_layer: bool = True) -> None: ...
    def require_clean(self) -> None: ...


class GuardedModel(Protocol):
    """What is used of `ray_weightsync.worker.backend.VLLMModel`."""

    device: torch.device

    @property
    def reload(self) -> Reload: ...
    def load_by(self, load_weights: Callable[[Pairs], Any], pairs: Pairs, seen: Seen, /) -> Any: ...


class Guard:
    """The `ray_weightsync.worker.course.Course` of a session of ``backend``.

    Args:
        backend: Made for ``model``, and ready to receive.
        traits: What is known of it.
        model: The model.
        into: The guarded way into it.
        rank_in_replica: Tells the worker's place among all workers of its replica, from 0.
    """

    many_updates = True

    def __init__(
        self,
        backend: WorkerBackend,
        traits: BackendTraits,
        model: Any,
        into: GuardedModel,
        rank_in_replica: Callable[[], int],
    ) -> None:
        self._backend = backend
        self._traits = traits
        self._model = model
        self._into = into
        self._rank_in_replica = rank_in_replica
        self._arrivals: Arrivals | None = None
        self._seen: Seen = {}
        self._started = False
        self._whole = False
        self._failure: Exception | None = None

    def start(self) -> None:
        """Flush what was left open, then as the backend does."""
        self._into.reload.start(self._backend.start_weight_update)
        self._started = True

    def update(self, plan: Plan, info: Mapping[str, Any]) -> Received | None:
        """Receive one part of a session's weights.

        Raises:
            ValueError: if the update is another backend's, or brings what is not in the plan, or the plan is one that it cannot bring.
            Exception: whatever the backend or a loader raises.
        """
        self._whole = False
        update_info = self._update_info(info)
        if not self._traits.attested:
            self._receive(update_info)
            self._whole = True
            return None
        if plan.partial:
            raise ValueError(f"plan {plan.digest} is partial; backend {self._traits.name!r} can only bring all of a model")
        arrivals = self._arrivals = self._arrivals or Arrivals(plan)
        self._receive_noted(update_info, arrivals)
        received = arrivals.received()
        self._whole = received is not None
        return received

    def drop(self, info: Mapping[str, Any]) -> None:
        """Receive, where others wait for it and nothing is written by the backend itself, and load nothing."""
        self._whole = False
        if self._traits.attested and self._traits.grouped:
            with self._loading_by(_exhaust):
                self._receive(self._update_info(info))

    def finish(self) -> None:
        """As the backend does, if all is well; otherwise flush. Afterwards, raised or not, the model is clean.

        Raises:
            ValueError: if not all of the plan came.
            RuntimeError: if a layer was given nothing, or the model cannot be brought into a clean state.
            Exception: whatever the backend raises.
        """
        if self._whole:
            self._into.reload.finish(self._backend.finish_weight_update, every_layer=self._traits.attested)
            return
        self._give_up()
        missing = self._arrivals.missing() if self._arrivals is not None and self._failure is None else None
        if missing is not None:
            raise ValueError(missing)

    def _give_up(self) -> None:
        """End the session without completing it. The backend is told as well, as it may hold on to something; on a clean model its
        *finish* changes nothing."""
        steps: list[Callable[[], None]] = [self._into.reload.clear]
        if self._started:
            # Some load on threads of their own, which must have come to an end before anything is put back.
            steps = [getattr(self._backend, "drain_pending", _nothing), *steps, self._backend.finish_weight_update, *steps]
        failures = []
        for step in (*steps, self._into.reload.require_clean):
            try:
                step()
            except Exception as error:
                failures.append(payload.words_of(error))
        if failures:
            raise RuntimeError("the session could not be ended properly: " + "; ".join(dict.fromkeys(failures)))

    def _update_info(self, info: Mapping[str, Any]) -> dict[str, Any]:
        name = payload.text(info, "backend")
        if name != self._traits.name:
            raise ValueError(f"this update is of backend {name!r}, the session was begun for {self._traits.name!r}")
        given = info.get("update_info")
        if isinstance(given, list):  # one for each worker
            rank = self._rank_in_replica()
            if rank >= len(given):
                raise ValueError(f"'update_info' has {len(given)} entries, none of them for rank {rank} of this replica")
            given = given[rank]
        return dict(from_plain(payload.mapping({"update_info": given}, "update_info")))

    def _receive(self, update_info: dict[str, Any]) -> None:
        if self._traits.name == "ipc":
            require_handles(update_info, told_device(self._into.device)["uuid"])
        if self._into.device.type == "cpu":  # vLLM's update_weights is this, and a wait for an accelerator
            self._backend.receive_weights(self._backend.parse_update_info(update_info))
        else:
            self._backend.update_weights(update_info)

    def _receive_noted(self, update_info: dict[str, Any], arrivals: Arrivals) -> None:
        load_weights: Callable[[Pairs], Any] = self._model.load_weights

        def load(pairs: Pairs) -> Any:
            pairs = iter(pairs)
            try:
                if self._failure is None:
                    return self._into.load_by(load_weights, arrivals.noted(pairs), self._seen)
            except Exception as error:
                self._failure = error
            return _exhaust(pairs)

        try:
            with self._loading_by(load):
                self._receive(update_info)
        except Exception as error:
            self._failure = self._failure or error
        if self._failure is not None:
            raise self._failure

    @contextmanager
    def _loading_by(self, load: Callable[[Pairs], Any]) -> Iterator[None]:
        own = vars(self._model)
        before = own.get("load_weights")
        own["load_weights"] = load
        try:
            yield
        finally:
            if before is None:
                del own["load_weights"]
            else:
                own["load_weights"] = before


def _exhaust(pairs: Pairs) -> set[str]:
    return {name for name, _ in pairs}


def _nothing() -> None:
    pass
