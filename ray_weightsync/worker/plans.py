"""The plans that one worker's model can load: judged a piece at a time, kept by digest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from ray_weightsync.weights.piecemeal import Piecemeal
from ray_weightsync.weights.plan import Plan
from ray_weightsync.worker import payload
from ray_weightsync.worker.seams import ModelLoader

MAX_PLANS = 4
"""Plans a worker keeps: enough for a main and a draft model and one change of each; 37,000 tensors are some 10 MB of Python."""

PIECE_S = 0.004
"""Seconds of judging between two steps of an engine: requests in flight are not to wait longer for it."""

Judged = tuple[Plan, list[str]]
"""A plan that the model can load, and what of it could not be judged."""


class WorkerPlans:
    """One worker's. Calls come one at a time.

    A judgement takes 70 to 140 us a tensor. So it is begun by one call (`judge`), carried on by others (`advance`), each between two steps
    of the engine, and asked for by a last one (`judged`), which does at once whatever of it is still to be done.
    """

    def __init__(self, model: ModelLoader) -> None:
        self._model = model
        self._kept: OrderedDict[str, Judged] = OrderedDict()
        self._digest: str | None = None
        self._judgement: Piecemeal[Judged] | None = None

    def judge(self, wire: Mapping[str, Any]) -> None:
        """Begin to judge a wire plan, in place of any other that was being judged."""
        digest = payload.text(wire, "digest")
        if digest in self._kept or digest == self._digest:
            return
        self.stop_judging()
        self._digest, self._judgement = digest, Piecemeal(lambda: self._judge(wire), name="rws-judge")

    def advance(self) -> str | None:
        """Judge for `PIECE_S` seconds. Returns the digest of the plan that is still being judged."""
        if self._judgement is None or self._judgement.advance(PIECE_S):
            return None
        return self._digest

    def judged(self, wire: Mapping[str, Any]) -> Judged:
        """The plan in ``wire`` and what of it could not be judged.

        Raises:
            ValueError: with the problems, if this worker's model cannot load it, or ``wire`` is no plan.
        """
        digest = payload.text(wire, "digest")
        if digest in self._kept:
            return self._kept[digest]
        if digest != self._digest or self._judgement is None:
            self.stop_judging()
            return self._judge(wire)
        judgement, self._digest, self._judgement = self._judgement, None, None
        return judgement.result()

    def _judge(self, wire: Mapping[str, Any]) -> Judged:
        plan = Plan.from_wire(dict(wire))  # verifies the digest
        problems = self._model.check(plan)
        if problems:
            raise ValueError("; ".join(problems))
        return plan, self._model.unjudged()

    def stop_judging(self) -> None:
        """Give up what is being judged: the model is about to change, or nobody asks any more."""
        judgement, self._digest, self._judgement = self._judgement, None, None
        if judgement is not None:
            judgement.cancel()

    def keep(self, judged: Judged) -> None:
        """Remember a plan, in place of the one that was not used for longest."""
        digest = judged[0].digest
        self._kept[digest] = judged
        self._kept.move_to_end(digest)
        while len(self._kept) > MAX_PLANS:
            self._kept.popitem(last=False)

    def use(self, digest: str) -> Plan:
        """The plan that an update names.

        Raises:
            ValueError: if it is not kept here.
        """
        if digest not in self._kept:
            raise ValueError(f"plan {digest} is not known here; send it with op 'plan' first")
        self._kept.move_to_end(digest)
        return self._kept[digest][0]

    def digests(self) -> list[str]:
        """Of the plans kept, the one that was not used for longest first."""
        return list(self._kept)

    def unjudged(self) -> dict[str, list[str]]:
        """By digest, what could not be judged, where there is anything."""
        return {digest: list(unjudged) for digest, (_, unjudged) in self._kept.items() if unjudged}

    def clear(self) -> None:
        """Forget all of them."""
        self.stop_judging()
        self._kept.clear()
