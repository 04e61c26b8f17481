"""Faults inside one worker: patches on the instances of its `WorkerUpdates`, taken off again by `heal`.

It is driven by plain dicts, since it sits behind an engine's own RPC, and it tells what happened through files: a worker that hangs
answers no RPC. The files lie in a directory that the engine's actor made on the node of both.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ray_weightsync.testing.spec import FaultSpec, InjectedFault
from ray_weightsync.weights.copying import flat_bytes, hash_only
from ray_weightsync.weights.digest import WeightsDigest
from ray_weightsync.weights.plan import Plan
from ray_weightsync.worker.course import Course, Delegate
from ray_weightsync.worker.receiver import Delivery, Received
from ray_weightsync.worker.updates import WorkerUpdates

MAX_HANG_S = 600.0
"""A hang that nobody releases ends by itself: whoever armed it may be dead."""

POLL_S = 0.005


class Armed:
    """A fault that waits for its phase in this worker."""

    def __init__(self, fault_id: str, spec: FaultSpec, directory: str) -> None:
        self.spec = spec
        self.struck = 0
        self._note = Path(directory, f"{fault_id}.struck")
        self._gate = Path(directory, f"{fault_id}.released")

    def strike(self) -> None:
        """Do what can be done at the place itself; ``"corrupt"`` is left to whoever has the bytes."""
        self.struck += 1
        with self._note.open("a") as note:
            note.write("x")
        spec = self.spec
        if spec.kind == "raise":
            raise InjectedFault(spec.words)
        if spec.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif spec.kind == "slow":
            time.sleep(spec.seconds or 0)
        elif spec.kind == "hang":
            self._wait_released()
            if not spec.carried_out:
                raise InjectedFault(f"{spec.words}: it came back at last, and failed")

    def _wait_released(self) -> None:
        until = time.monotonic() + MAX_HANG_S
        while not self._gate.exists() and self._gate.parent.exists():  # without the directory, the kit has been taken out
            if time.monotonic() > until:
                raise InjectedFault(f"{self.spec.words}: not released within {MAX_HANG_S:.0f} s")
            time.sleep(POLL_S)


class WorkerFaults:
    """The faults of one worker.

    Args:
        updates: The worker's own.
        flush: Ends an open reload of the model without completing it: a *finish* that fails leaves the model flushed, as a real one does.
    """

    def __init__(self, updates: WorkerUpdates, *, flush: Callable[[], None] = lambda: None) -> None:
        self._updates = updates
        self._flush = flush
        self._armed: list[Armed] = []
        self._patched: list[tuple[Any, str]] = []

    def obey(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out ``{"op": "arm", "id": ..., "directory": ..., "spec": {...}}`` or ``{"op": "heal"}``.

        Returns:
            ``rank``, ``world_size``, and ``armed``, whether this worker took the fault as its own.

        Raises:
            ConfigError, KeyError, ValueError: if it cannot be understood.
        """
        agreement = self._updates._agreement
        mine = False
        if order["op"] == "arm":
            spec = FaultSpec(**order["spec"])
            mine = spec.rank == agreement.rank
            if mine:
                self._arm(Armed(order["id"], spec, order["directory"]))
        elif order["op"] == "heal":
            self.heal()
        else:
            raise ValueError(f"op must be 'arm' or 'heal', not {order['op']!r}")
        return {"rank": agreement.rank, "world_size": agreement.world_size, "armed": mine}

    def heal(self) -> None:
        """Take every fault out again."""
        self._armed.clear()
        while self._patched:
            owner, name = self._patched.pop()
            delattr(owner, name)

    def _arm(self, fault: Armed) -> None:
        if not self._patched:
            model = self._updates._model
            self._patch(model, "start", self._start(model.start))
            self._patch(model, "finish", self._finish(model.finish))
            self._patch(self._updates, "_verdict", self._verdict(self._updates._verdict))
            for receiver in self._updates._receivers.values():
                self._patch(receiver, "open", self._open(receiver.open))
                if isinstance(receiver, Delegate):
                    self._patch(receiver, "course", self._course(receiver.course))
        self._armed.append(fault)

    def _patch(self, owner: Any, name: str, patch: Callable[..., Any]) -> None:
        setattr(owner, name, patch)
        self._patched.append((owner, name))

    def _next(self, phase: str) -> Armed | None:
        return next((each for each in self._armed if each.spec.phase == phase and each.struck < each.spec.times), None)

    def _strike(self, phase: str) -> None:
        fault = self._next(phase)
        if fault is not None:
            fault.strike()

    def _start(self, theirs: Callable[[], None]) -> Callable[[], None]:
        def start() -> None:
            self._strike("start")
            theirs()

        return start

    def _finish(self, theirs: Callable[[], None]) -> Callable[[], None]:
        def finish() -> None:
            try:
                self._strike("finish")
            except InjectedFault:
                self._flush()
                raise
            theirs()

        return finish

    def _verdict(self, theirs: Callable[[Mapping[str, Any]], str | None]) -> Callable[[Mapping[str, Any]], str | None]:
        def verdict(info: Mapping[str, Any]) -> str | None:
            self._strike("outcome")
            return theirs(info)

        return verdict

    def _course(self, theirs: Callable[[], Course]) -> Callable[[], Course]:
        return lambda: FaultyCourse(theirs(), self._strike, self._next, self._flush)

    def _open(self, theirs: Callable[[Plan, Mapping[str, Any]], Delivery]) -> Callable[[Plan, Mapping[str, Any]], Delivery]:
        def open_one(plan: Plan, update: Mapping[str, Any]) -> Delivery:
            delivery, fault = theirs(plan, update), self._next("load")
            return delivery if fault is None else FaultyDelivery(delivery, plan, fault)

        return open_one


class FaultyDelivery:
    """A delivery with a fault half way: at the middle one of its tensors that have bytes."""

    def __init__(self, delivery: Delivery, plan: Plan, fault: Armed) -> None:
        self._delivery = delivery
        self._plan = plan
        self._fault = fault
        self._digest: str | None = None

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what the delivery yields, up to the fault or through it."""
        places = [place for place, spec in enumerate(self._plan.tensors) if spec.nbytes]
        half = places[len(places) // 2] if places else 0
        digest = WeightsDigest(self._plan)
        corrupts = self._fault.spec.kind == "corrupt"
        for place, (name, tensor) in enumerate(self._delivery):
            if place == half:
                self._fault.strike()
                if corrupts:
                    flip_last_byte(tensor)
            if corrupts:
                digest.add(hash_only(tensor))
            yield name, tensor
        if corrupts and not self._fault.spec.silent:
            self._digest = digest.hexdigest()

    def received(self) -> Received:
        """The delivery's word, or, of what was corrupted, the digest of what was really handed over."""
        received = self._delivery.received()
        return received if self._digest is None else dataclasses.replace(received, digest=self._digest)

    def close(self) -> None:
        """As the delivery."""
        self._delivery.close()


class FaultyCourse:
    """A delegate's session with faults: in its *start*, in its first update, in its *finish*."""

    many_updates = True

    def __init__(
        self, course: Course, strike: Callable[[str], None], armed: Callable[[str], Armed | None], flush: Callable[[], None]
    ) -> None:
        self._course = course
        self._strike = strike
        self._armed = armed
        self._flush = flush

    def start(self) -> None:
        """As the course, after the fault."""
        self._strike("start")
        self._course.start()

    def update(self, plan: Plan, info: Mapping[str, Any]) -> Received | None:
        """As the course. What arrives after a fault that raises is received and dropped, as it is when a loader fails."""
        fault = self._armed("load")
        if fault is not None and fault.spec.kind == "corrupt":
            raise InjectedFault("the bytes of a backend of vLLM's cannot be corrupted on their way; choose another kind of fault")
        try:
            self._strike("load")
        except InjectedFault:
            self._course.drop(info)
            raise
        return self._course.update(plan, info)

    def drop(self, info: Mapping[str, Any]) -> None:
        """As the course."""
        self._course.drop(info)

    def finish(self) -> None:
        """As the course, after the fault; one that raises leaves the model flushed, as a real one does."""
        try:
            self._strike("finish")
        except InjectedFault:
            self._flush()
            raise
        self._course.finish()


def flip_last_byte(tensor: torch.Tensor) -> None:
    """Invert the last byte of a contiguous tensor that has one: of a float on a little-endian machine, its sign and exponent."""
    if tensor.numel():
        last = flat_bytes(tensor.detach())[-1:]
        last.copy_(last.bitwise_not())
