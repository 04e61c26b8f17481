"""Who may touch a model now: requests, one RPC at a time, or nobody. vLLM's scheduling rules, without vLLM, torch or Ray.

A *step* is one request's forward. As in vLLM's engine core, RPCs run between steps and one at a time; a pause freezes what has not
begun and returns once nothing runs; a request that gets its turn while an update is open kills the engine, for good.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

PAUSE_MODES = ("abort", "wait", "keep")


class EngineDeadError(RuntimeError):
    """The engine is dead and stays dead: something ran on half-written weights. Its actor has to be replaced."""


class RequestAbortedError(RuntimeError):
    """The request was frozen by a pause and then aborted by another; it never ran."""


class StepGate:
    """The one lock of an engine. Thread-safe; every method may be called from any thread.

    Its waits have no deadline of their own, as vLLM's have none: a frozen request waits until someone resumes or aborts.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._paused = False
        self._running = 0
        self._frozen = 0
        self._aborts = 0
        self._rpcs_between_steps = 0
        self._rpc_active = False
        self._update_open = False
        self._dead: str | None = None

    @property
    def paused(self) -> bool:
        """Whether new steps are held back."""
        return self._paused

    @property
    def frozen(self) -> int:
        """Requests that have arrived and not begun."""
        return self._frozen

    @property
    def unfinished(self) -> int:
        """Requests that have arrived and not ended."""
        return self._frozen + self._running

    @property
    def dead(self) -> str | None:
        """What killed the engine; None while it lives."""
        return self._dead

    @property
    def update_open(self) -> bool:
        """Whether a weight update has been started and not finished."""
        return self._update_open

    def check_alive(self) -> None:
        """Raise `EngineDeadError` if the engine is dead."""
        if self._dead is not None:
            raise EngineDeadError(f"engine is dead: {self._dead}")

    @contextmanager
    def step(self) -> Iterator[None]:
        """Hold the model for one request's forward, when its turn has come.

        Raises:
            RequestAbortedError: if a pause of mode ``"abort"`` came while the request had not begun.
            EngineDeadError: if the engine is dead, or dies now because its weights are being replaced.
        """
        with self._changed:
            self.check_alive()
            aborts = self._aborts
            self._frozen += 1
            self._changed.notify_all()  # for `wait_frozen`
            try:
                while self._paused or self._rpcs_between_steps:
                    self._changed.wait()
                    self.check_alive()
                    if self._aborts != aborts:
                        raise RequestAbortedError("the request was aborted by pause_generation(mode='abort') before it ran")
            finally:
                self._frozen -= 1
                self._changed.notify_all()
            if self._update_open:
                self._dead = "a request ran between start_weight_update and finish_weight_update, and generation was not paused"
                self._changed.notify_all()
                self.check_alive()
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    @contextmanager
    def rpc(self, *, between_steps: bool = True) -> Iterator[None]:
        """Be the one RPC that runs now; with ``between_steps`` no step runs meanwhile.

        Raises:
            EngineDeadError: if the engine is dead.
        """
        with self._changed:
            self.check_alive()
            # Counted while it waits: a stream of requests must not starve an RPC.
            self._rpcs_between_steps += between_steps
            try:
                while self._rpc_active or (between_steps and self._running):
                    self._changed.wait()
                    self.check_alive()
            except BaseException:
                self._rpcs_between_steps -= between_steps
                self._changed.notify_all()
                raise
            self._rpc_active = True
        try:
            yield
        finally:
            with self._changed:
                self._rpc_active = False
                self._rpcs_between_steps -= between_steps
                self._changed.notify_all()

    def open_update(self) -> None:
        """Mark an update as open. To be called inside `rpc`.

        Raises:
            RuntimeError: if one is open already; it stays open.
        """
        if self._update_open:
            raise RuntimeError("start_weight_update called while a weight update is already active. Call finish_weight_update first.")
        self._update_open = True

    def require_update(self, problem: str) -> None:
        """Raise `RuntimeError` with ``problem`` unless an update is open."""
        if not self._update_open:
            raise RuntimeError(problem)

    def close_update(self) -> None:
        """Mark the update as finished. To be called inside `rpc`."""
        self._update_open = False

    def pause(self, mode: str) -> None:
        """Hold new steps back and return once none runs. ``"abort"`` ends the requests that have not begun; ``"wait"`` and ``"keep"``
        are the same here, since a request is a single step.

        Raises:
            ValueError: for another mode.
            EngineDeadError: if the engine is dead.
        """
        if mode not in PAUSE_MODES:
            raise ValueError(f"Invalid pause mode: {mode}")
        with self._changed:
            self.check_alive()
            self._paused = True
            self._aborts += mode == "abort"
            self._changed.notify_all()
            while self._running and self._paused:
                self._changed.wait()
                self.check_alive()

    def resume(self) -> None:
        """Let steps run. Twice is harmless."""
        with self._changed:
            self.check_alive()
            self._paused = False
            self._changed.notify_all()

    def wait_frozen(self, num: int, timeout_s: float) -> bool:
        """Wait until at least ``num`` requests are held back; False if that took longer than ``timeout_s`` seconds. For tests."""
        with self._changed:
            return self._changed.wait_for(lambda: self._frozen >= num, timeout_s)
