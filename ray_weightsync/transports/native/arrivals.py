"""What of a plan has come, by name: the digest of each tensor, taken before its loader sees it. In whatever order and parts it comes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from ray_weightsync.weights.copying import hash_only
from ray_weightsync.weights.digest import WeightsDigest
from ray_weightsync.weights.plan import Plan
from ray_weightsync.worker.payload import listed
from ray_weightsync.worker.receiver import Received

MAX_NAMED = 3


class Arrivals:
    """One session's. 16 bytes are kept of each tensor."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._specs = {spec.name: spec for spec in plan.tensors}
        self._digests: dict[str, bytes] = {}

    def noted(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ``pairs`` as they are.

        Raises:
            ValueError: in place of a tensor that is not one of the plan's, or came before.
        """
        for name, tensor in pairs:
            spec = self._specs.get(name)
            if spec is None:
                raise ValueError(f"{name!r} came, which is not in plan {self._plan.digest}")
            if tensor.dtype != spec.torch_dtype or tuple(tensor.shape) != spec.shape:
                came = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
                raise ValueError(f"{name!r} came as {came}, in the plan it is {spec.dtype} {list(spec.shape)}")
            if name in self._digests:
                raise ValueError(f"{name!r} came twice")
            self._digests[name] = hash_only(tensor)
            yield name, tensor

    @property
    def num_tensors(self) -> int:
        """Tensors that came."""
        return len(self._digests)

    def received(self) -> Received | None:
        """All of the plan, with the digest over it; None as long as something is missing."""
        if len(self._digests) < len(self._specs):
            return None
        digest = WeightsDigest(self._plan)
        for name in self._plan.names:
            digest.add(self._digests[name])
        return Received(snapshot=None, digest=digest.hexdigest(), num_bytes=self._plan.weight_bytes, num_tensors=len(self._plan.tensors))

    def missing(self) -> str | None:
        """What has not come, in words."""
        names = [name for name in self._plan.names if name not in self._digests]
        if not names:
            return None
        return f"{len(names)} of {len(self._specs)} tensors of the plan did not come: {listed(names, MAX_NAMED)}"
