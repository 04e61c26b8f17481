"""The two seams of `WorkerUpdates`: the way into one worker's model, and the way to the other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from ray_weightsync.weights.plan import Plan


class ModelLoader(Protocol):
    """The way into one worker's model. Every method may raise; `WorkerUpdates` records it."""

    def check(self, plan: Plan) -> list[str]:
        """What speaks against loading ``plan``, one sentence each; empty if nothing does. The live model is not touched."""
        ...

    def unjudged(self) -> list[str]:
        """What the latest `check` could not judge: guarantees not given, each with the reason."""
        ...

    def start(self) -> None:
        """Make the model ready to take a whole plan's weights, flushing leftovers of an earlier session first."""
        ...

    def load(self, pairs: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Hand every pair to the model. A tensor may be kept until `finish`, or for good."""
        ...

    def finish(self) -> None:
        """Complete what was loaded, or flush what was not. Afterwards, raised or not, the next `start` works.

        Raises:
            Exception: if the model does not hold what was loaded.
        """
        ...


class Agreement(Protocol):
    """How the ranks of one engine exchange words."""

    rank: int
    world_size: int

    def gather(self, words: str | None, limit_s: float) -> list[str | None]:
        """Every rank's words in rank order (None: nothing to complain about), after at most ``limit_s`` seconds.

        A rank that did not answer in time gets words that say so. Every rank must call this equally often.
        """
        ...


class SoleRank:
    """The agreement of an engine with one worker: there is nobody to ask."""

    rank = 0
    world_size = 1

    def gather(self, words: str | None, limit_s: float) -> list[str | None]:
        """The words of the only rank."""
        return [words]
