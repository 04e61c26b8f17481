"""What is sent: plans, sources, transforms, packing and the digest. Knows no transport, no engine and no Ray."""

from ray_weightsync.weights.digest import WeightsDigest, payload_digest, weights_digest
from ray_weightsync.weights.packing import ALIGN, Packed, pack, view
from ray_weightsync.weights.plan import ParamMeta, Plan, Segment, TensorSpec
from ray_weightsync.weights.sources import ModuleSource, SafetensorsSource, SourceLike, StateDictSource, WeightSource, as_source, checked
from ray_weightsync.weights.transforms import Transform, cast, compose, rename, split_experts

__all__ = [
    "ALIGN",
    "ModuleSource",
    "Packed",
    "ParamMeta",
    "Plan",
    "SafetensorsSource",
    "Segment",
    "SourceLike",
    "StateDictSource",
    "TensorSpec",
    "Transform",
    "WeightSource",
    "WeightsDigest",
    "as_source",
    "cast",
    "checked",
    "compose",
    "pack",
    "payload_digest",
    "rename",
    "split_experts",
    "view",
    "weights_digest",
]
