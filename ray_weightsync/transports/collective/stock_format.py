"""What engines on vLLM's own ``nccl`` backend are told, and what they can read. Pure.

The fields are those of vLLM's ``NCCLWeightTransferInitInfo`` and ``NCCLWeightTransferUpdateInfo`` (0.28 to 0.32; tests hold them
together). How a transfer is cut is said once, when the group is made; each update then carries names, dtypes and shapes alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ray_weightsync.errors import ConfigError
from ray_weightsync.transports.collective.packed import packed_cuts, require_aligned
from ray_weightsync.weights.plan import Plan, TensorSpec
from ray_weightsync.weights.tensor_spec import is_int

NCCL_DTYPES = frozenset({"int8", "uint8", "int32", "int64", "float16", "float32", "float64", "bfloat16", "float8_e4m3fn"})
"""What vLLM's communicator has an NCCL type for (``ncclDataTypeEnum``); packed tensors travel as uint8 and may have any dtype."""

OLDEST = (0, 28)

VIEWS_SCALARS_SINCE = (0, 32)
"""The first vLLM known to take a tensor without dimensions out of a packed buffer; 0.28 raises in the middle of the broadcast."""


@dataclass(frozen=True, kw_only=True)
class StockFormat:
    """How a transfer is cut. Both sides must have the same; the names and defaults are those of vLLM's trainer.

    Attributes:
        packed: Several tensors in one broadcast. Otherwise each is broadcast by itself.
        packed_buffer_size_bytes: A broadcast ends with the first tensor that makes it larger than this.
        packed_num_buffers: Broadcasts that each side holds at a time.
    """

    packed: bool = True
    packed_buffer_size_bytes: int = 1 << 30
    packed_num_buffers: int = 2

    def __post_init__(self) -> None:
        if not isinstance(self.packed, bool):
            raise ConfigError(f"packed must be a bool, not {self.packed!r}")
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if not is_int(value) or value < 1:
                raise ConfigError(f"{field.name} must be an int of at least 1, not {value!r}")

    def cuts(self, plan: Plan) -> tuple[tuple[TensorSpec, ...], ...]:
        """The tensors of each broadcast, in order; they lie in it end to end, without padding."""
        return packed_cuts(plan, self.packed_buffer_size_bytes) if self.packed else tuple((spec,) for spec in plan.tensors)

    def init_info(self, meeting: Mapping[str, Any], *, rank_offset: int, world_size: int) -> dict[str, Any]:
        """The ``init_info`` of one replica: how the sender is met (`Meeting.told`), with which ranks, and how transfers are cut."""
        return {**meeting, "rank_offset": rank_offset, "world_size": world_size, **asdict(self)}


def update_info(plan: Plan) -> dict[str, Any]:
    """The ``update_info`` of one transfer, the same for every replica: ``names``, ``dtype_names`` and ``shapes``, in plan order."""
    return {
        "names": [spec.name for spec in plan.tensors],
        "dtype_names": [spec.dtype for spec in plan.tensors],
        "shapes": [list(spec.shape) for spec in plan.tensors],
    }


def check(plan: Plan, form: StockFormat, *, vllm: tuple[int, int] = VIEWS_SCALARS_SINCE) -> None:
    """Refuse a plan that vLLM's receiver would fail on, which it does in the middle of a broadcast while its sender waits for ever.

    Args:
        plan: What is to be sent.
        form: How.
        vllm: Version of the oldest engine, major and minor.

    Raises:
        ConfigError: naming the tensor, and saying what to do.
    """
    if not form.packed:
        for spec in plan.tensors:
            if spec.dtype not in NCCL_DTYPES:
                raise ConfigError(
                    f"tensor {spec.name!r}: NCCL has no type for {spec.dtype}, so vLLM's nccl backend cannot receive it by itself",
                    hint="send packed (packed=True), or cast it",
                )
        return
    require_aligned(form.cuts(plan))
    scalar = next((spec.name for spec in plan.tensors if not spec.shape), None)
    if scalar is not None and vllm < VIEWS_SCALARS_SINCE:
        raise ConfigError(
            f"tensor {scalar!r}: the packed receiver of vLLM {vllm[0]}.{vllm[1]} fails on tensors without dimensions",
            hint="send each tensor by itself (packed=False), or update vLLM",
        )


def form_for(plan: Plan, *, buffer_bytes: int, num_buffers: int, vllm: tuple[int, int] = OLDEST) -> StockFormat:
    """The form in which engines of vLLM ``vllm`` and later can read ``plan``: packed, unless that format cannot carry it.

    Raises:
        ConfigError: if they cannot in either form; it names the tensor.
    """
    packed = StockFormat(packed_buffer_size_bytes=buffer_bytes, packed_num_buffers=num_buffers)
    try:
        check(plan, packed, vllm=vllm)
    except ConfigError:
        one_by_one = StockFormat(packed=False, packed_num_buffers=num_buffers)
        check(plan, one_by_one)
        return one_by_one
    return packed


def largest_cut(plan: Plan, form: StockFormat) -> int:
    """Bytes of the largest broadcast, which is what each of the sender's buffers takes."""
    return max(sum(spec.nbytes for spec in cut) for cut in form.cuts(plan))
