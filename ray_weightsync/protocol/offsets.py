"""Each engine's ranks in a group that a trainer engine of vLLM's makes: it sends one ``init_info`` for all of them. Pure.

A worker's rank is ``data_parallel_index * (tensor x pipeline) + rank + rank_offset``, so with one offset for all, independent engines
claim the same ranks, and joining never ends (seen with vLLM's own Ray client).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ray_weightsync.errors import ConfigError

FIELDS = frozenset(
    {
        "master_address",
        "master_port",
        "nccl_unique_id_b64",
        "rank_offset",
        "world_size",
        "packed",
        "packed_buffer_size_bytes",
        "packed_num_buffers",
    }
)
"""Of vLLM's ``NCCLWeightTransferInitInfo``, for its backends ``nccl`` and ``sparse_nccl``. The others have more, and one mesh of ranks."""


def joins_a_group(init_info: object) -> bool:
    """Whether ``init_info`` is one whose ``rank_offset`` has to differ from engine to engine."""
    return isinstance(init_info, Mapping) and {"rank_offset", "world_size"} <= init_info.keys() <= FIELDS


def spread(
    init_info: Mapping[str, Any], *, labels: Sequence[str], world_sizes: Sequence[int], indices: Sequence[int | None]
) -> list[dict[str, Any]]:
    """One ``init_info`` per engine: each begins where the workers before it end.

    Args:
        init_info: What the trainer engine sent; its ``rank_offset`` is the first engine's.
        labels: The engines' names, for errors.
        world_sizes: Their workers.
        indices: Their data-parallel index, where it can be seen. The engines of one deployment share an offset: their index tells
            them apart.

    Raises:
        ConfigError: if the ranks would not be those from ``rank_offset`` to ``world_size - 1``, each one once.
    """
    several = any(indices)
    if several and sorted(index or 0 for index in indices) != list(range(len(indices))):
        told = ", ".join(f"{label} is {index or 0}" for label, index in zip(labels, indices, strict=True))
        raise ConfigError(
            f"these are data-parallel engines of more than one deployment, or not all of one ({told}), whose ranks cannot be told",
            hint="give each its own init_info with PerReplica",
        )
    offset = first = init_info["rank_offset"]
    if several:
        # Of a mixture of experts each engine says how many workers all of them have, of a dense model how many it has itself.
        possible = sorted({first + max(world_sizes), first + sum(world_sizes)})
        if init_info["world_size"] not in possible:
            raise ConfigError(
                f"the trainer says world_size={init_info['world_size']}, and with {first} ranks before this deployment's workers there are "
                f"{' or '.join(map(str, possible))}: joining would never end",
                hint="make the trainer engine with the world_size of all its workers",
            )
        return [dict(init_info) for _ in labels]
    spread_out = []
    for size in world_sizes:
        spread_out.append({**init_info, "rank_offset": offset})
        offset += size
    if offset != init_info["world_size"]:
        told = ", ".join(f"{label} has {size}" for label, size in zip(labels, world_sizes, strict=True))
        raise ConfigError(
            f"the group would have {offset} ranks, {first} before the engines' workers ({told}), but the trainer says "
            f"world_size={init_info['world_size']}: joining would never end",
            hint=f"make the trainer engine with world_size={offset}",
        )
    return spread_out
