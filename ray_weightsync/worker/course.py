"""The course of a session: what its start, its updates and its finish do.

One is ours: a receiver yields tensors, and the model's own loaders take them. Others belong to a `Delegate`, which has bytes of its own
and a model's loaders at its command. Which one a session takes is settled before it starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ray_weightsync.weights.plan import Plan
from ray_weightsync.worker import payload
from ray_weightsync.worker.receiver import Grouped, Received, Receiver
from ray_weightsync.worker.seams import ModelLoader


class Course(Protocol):
    """Every method may raise; `WorkerUpdates` records it.

    Attributes:
        many_updates: Whether the bytes of one session may come in several ``update_weights``.
    """

    many_updates: bool

    def start(self) -> None:
        """Make the model ready."""
        ...

    def update(self, plan: Plan, info: Mapping[str, Any]) -> Received | None:
        """Receive and load what ``info``, an ``update_weights`` payload, names.

        Returns:
            What the whole session has received, once that is all of ``plan`` and can be attested.
        """
        ...

    def drop(self, info: Mapping[str, Any]) -> None:
        """Take what ``info`` names for the sake of those that wait for this worker, and load nothing: the session has failed."""
        ...

    def finish(self) -> None:
        """Complete what was loaded, or flush what was not. Afterwards, raised or not, any course can start.

        Raises:
            Exception: if the model does not hold what was loaded.
        """
        ...


@dataclass(frozen=True)
class Chosen:
    """A delegate that has the next session, which is of this round."""

    delegate: Delegate
    round: str
    epoch: int


@runtime_checkable
class Delegate(Protocol):
    """A receiver whose sessions have a course of their own. It is made ready in two steps, after each of which the ranks agree."""

    def prepare(self, info: Mapping[str, Any]) -> None:
        """Make ready alone for what ``info``, a ``"native"`` op, asks for: all that can go wrong before another process waits for this one.

        Raises:
            Exception: if it cannot be had here.
        """
        ...

    def join(self) -> None:
        """Meet the sender, where there is one to be met. May block.

        Raises:
            Exception: if that fails.
        """
        ...

    def course(self) -> Course:
        """The course of the next session."""
        ...


class ByReceivers:
    """The course in which a receiver delivers and `ModelLoader` loads, in one update.

    Args:
        model: The way into this worker's model.
        receivers: By their transport's name on the wire.
        record: Runs a step, under a name; what it raises is recorded, so that it hides no other failure.
        plan_of: A plan that is known here, by its digest.
    """

    many_updates = False

    def __init__(
        self,
        model: ModelLoader,
        receivers: Mapping[str, Receiver],
        record: Callable[[str, Callable[[], None]], None],
        plan_of: Callable[[str], Plan],
    ) -> None:
        self._model = model
        self._receivers = receivers
        self._record = record
        self._plan_of = plan_of

    def start(self) -> None:
        """See `ModelLoader`."""
        self._model.start()

    def update(self, plan: Plan, info: Mapping[str, Any]) -> Received:
        """See `Course`.

        Raises:
            ValueError: if the transport is not known, or the plan is partial: a reload leaves nothing of a model as it is.
        """
        receiver = receiver_of(self._receivers, info)
        if plan.partial:
            raise ValueError(f"plan {plan.digest} is partial; it can only be brought by a backend that patches a model in place")
        delivery = receiver.open(plan, info)
        try:
            self._model.load(iter(delivery))
            return delivery.received()
        finally:
            self._record("closing the delivery", delivery.close)

    def drop(self, info: Mapping[str, Any]) -> None:
        """See `Course`. Where nobody waits for this worker nothing is opened."""
        receiver = receiver_of(self._receivers, info)
        if isinstance(receiver, Grouped):
            receiver.drain(self._plan_of(payload.text(info, "plan")), info)

    def finish(self) -> None:
        """See `ModelLoader`."""
        self._model.finish()


def receiver_of(receivers: Mapping[str, Receiver], info: Mapping[str, Any]) -> Receiver:
    """The receiver of the transport that ``info`` names.

    Raises:
        ValueError: if there is none.
    """
    transport = payload.text(info, "transport")
    if transport not in receivers:
        known = ", ".join(sorted(receivers)) or "none"
        raise ValueError(f"transport {transport!r} is not known here; this worker receives from: {known}")
    return receivers[transport]
