"""The weights of the round in progress, as a trainer engine sees them that lives for several rounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ray_weightsync.errors import ConfigError
from ray_weightsync.transports.native.patches import Patches
from ray_weightsync.weights.copying import hash_only
from ray_weightsync.weights.digest import WeightsDigest
from ray_weightsync.weights.packing import Packed
from ray_weightsync.weights.plan import ParamMeta, Plan
from ray_weightsync.weights.source_base import checked
from ray_weightsync.weights.sources import WeightSource


class RoundSource:
    """A `WeightSource` whose weights are another source's in every round. What is read is checked against the plan, and digested."""

    def __init__(self) -> None:
        self._source: WeightSource | None = None
        self._plan: Plan | None = None
        self._packed: Packed | None = None

    def begin(self, source: WeightSource, plan: Plan) -> None:
        """The round of ``plan`` sends ``source``."""
        self._source, self._plan, self._packed = source, plan, None

    @property
    def given(self) -> WeightSource:
        """What the round sends."""
        assert self._source is not None, "a round begins before anything is read"
        return self._source

    @property
    def plan(self) -> Plan:
        """What it declared."""
        assert self._plan is not None, "a round begins before anything is read"
        return self._plan

    def metadata(self) -> list[Any]:
        """What iteration yields: `ParamMeta`."""
        return [ParamMeta(spec.name, spec.torch_dtype, spec.shape) for spec in self.plan.tensors]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        plan = self.plan
        digest = WeightsDigest(plan)
        for spec, tensor in checked(self.given, plan):
            digest.add(hash_only(tensor))
            yield spec.name, tensor
        self._packed = Packed(digest=digest.hexdigest(), num_bytes=plan.weight_bytes, num_tensors=len(plan.tensors))

    def packed(self) -> Packed:
        """What was read.

        Raises:
            ConfigError: if it was not read to the end.
        """
        if isinstance(self.given, Patches):
            return self.given.packed()
        if self._packed is None:
            raise ConfigError("the trainer engine came to its end and had not read all weights")
        return self._packed
