"""Packing: the logical values of every tensor arrive bit for bit, under a digest of what really lies in the payload."""

from __future__ import annotations

import itertools
import sys
import threading
import time
import warnings
from collections.abc import Iterator

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_weightsync.errors import ConfigError
from ray_weightsync.weights import copying
from ray_weightsync.weights.digest import payload_digest, weights_digest
from ray_weightsync.weights.dtypes import DTYPES
from ray_weightsync.weights.packing import ALIGN, Packed, pack, view
from ray_weightsync.weights.plan import ParamMeta, Plan

QUICK = settings(deadline=None, print_blob=True, max_examples=80)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# "ComplexHalf support is experimental", once a process, for whoever makes such a tensor.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bit pattern, NaN payloads included; bool gets real ones."""
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return (raw % 2 if dtype is torch.bool else raw).view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> bytes:
    """Row-major bytes by another road than the one under test: numpy's, through integers of the same size."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor.view(INTEGERS.get(tensor.element_size(), tensor.dtype)).numpy().tobytes()


def plan_of(tensors: dict[str, torch.Tensor]) -> Plan:
    return Plan.from_metadata([ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()])


def packed(tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Plan, Packed]:
    plan = plan_of(tensors)
    out = torch.full((plan.num_bytes,), 0xEE, dtype=torch.uint8)
    result = pack(tensors.items(), plan, out)
    return out, plan, result


def assert_arrives(tensors: dict[str, torch.Tensor]) -> None:
    out, plan, result = packed(tensors)
    for spec, tensor in zip(plan.tensors, tensors.values(), strict=True):
        received = view(out, spec)
        assert received.dtype == tensor.dtype
        assert received.shape == tensor.shape
        assert received.is_contiguous()
        assert bits(received) == bits(tensor), spec.name
    assert result == Packed(digest=payload_digest(out, plan), num_bytes=plan.weight_bytes, num_tensors=len(tensors))
    assert result.digest == weights_digest(tensors)


@QUICK
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 6), max_size=4), st.integers(0, 1 << 30)),
        min_size=1,
        max_size=10,
    )
)
def test_any_dtype_and_shape_arrives_bit_for_bit(drawn: list[tuple[str, list[int], int]]) -> None:
    assert_arrives({f"t{i}": random_bits(tuple(shape), DTYPES[dtype], seed) for i, (dtype, shape, seed) in enumerate(drawn)})


@QUICK
@given(st.sampled_from(sorted(DTYPES)), st.data())
def test_any_strided_view_arrives_as_its_logical_values(dtype: str, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    tensor = random_bits(shape, DTYPES[dtype], 1)
    tensor = tensor.permute(data.draw(st.permutations(range(len(shape)))))
    for dim in range(tensor.dim()):
        start = data.draw(st.integers(0, tensor.shape[dim] - 1))
        tensor = tensor.as_strided(  # a slice with a step: the dtypes without kernels can be strided too
            [*tensor.shape[:dim], -(-(tensor.shape[dim] - start) // 2), *tensor.shape[dim + 1 :]],
            [*tensor.stride()[:dim], tensor.stride(dim) * 2, *tensor.stride()[dim + 1 :]],
            tensor.storage_offset() + start * tensor.stride(dim),
        )
    assert_arrives({"before": torch.ones(1), "view": tensor, "after": torch.ones(1)})


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_dtype_arrives_whole_transposed_scalar_and_empty(dtype: str) -> None:
    matrix = random_bits((67, 71), DTYPES[dtype], 2)
    assert_arrives(
        {
            "whole": matrix,
            "transposed": matrix.t(),
            "scalar": random_bits((), DTYPES[dtype], 3),
            "empty": random_bits((0, 4), DTYPES[dtype], 4),
        }
    )


def layouts() -> Iterator[tuple[str, torch.Tensor]]:
    base = random_bits((70, 90), torch.float32, 5)
    image = random_bits((3, 4, 5, 6), torch.bfloat16, 6)
    complexes = random_bits((8, 9), torch.complex64, 7)
    yield "transposed", base.t()
    yield "column slice", base[:, 10:20]
    yield "every other row and column", base[::2, 1::2]
    yield "expanded", base[:1].expand(50, 90)
    yield "channels-last", image.to(memory_format=torch.channels_last)
    yield "permuted", image.permute(2, 0, 3, 1)
    yield "odd stride of a dimension of size 1", base[:1].t()[:1].as_strided((5, 1), (1, 37))
    yield "unaligned storage offset", random_bits((100,), torch.uint8, 8)[3:67]
    yield "conjugate", complexes.conj()
    yield "conjugate and transposed", complexes.conj().t()
    yield "conjugate of 32 bits", random_bits((8, 9), torch.complex32, 9).conj()
    yield "negative", complexes.conj().imag
    yield "requires grad", torch.nn.Parameter(base.clone())
    yield "result of a computation", torch.nn.Parameter(base.clone()) * 2
    with torch.inference_mode():
        yield "inference tensor", base.clone()


LAYOUTS = dict(layouts())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_logical_values_arrive_of_a_tensor_that_is(layout: str) -> None:
    assert_arrives({layout: LAYOUTS[layout]})


def test_the_layouts_above_are_what_their_names_say() -> None:
    contiguous = {name for name, tensor in LAYOUTS.items() if tensor.is_contiguous()}
    assert {"transposed", "column slice", "every other row and column", "expanded", "channels-last", "permuted"}.isdisjoint(contiguous)
    assert LAYOUTS["conjugate"].is_conj()
    assert LAYOUTS["conjugate of 32 bits"].is_conj()
    assert LAYOUTS["negative"].is_neg()
    assert LAYOUTS["result of a computation"].requires_grad
    assert LAYOUTS["inference tensor"].is_inference()


def test_tied_tensors_arrive_under_each_of_their_names() -> None:
    tensor = random_bits((5, 7), torch.bfloat16, 10)
    assert_arrives({"embed": tensor, "head": tensor})


@pytest.mark.parametrize("nbytes", [copying.BLOCK_BYTES - 1, copying.BLOCK_BYTES, copying.BLOCK_BYTES + 1, 3 * copying.BLOCK_BYTES + 5])
def test_sizes_around_the_block_arrive(nbytes: int) -> None:
    assert_arrives({"a": random_bits((nbytes,), torch.uint8, 11), "b": random_bits((nbytes, 2), torch.uint8, 12)[:, 0]})


def test_a_device_tensor_takes_the_road_of_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    # No device here: the road itself is exact for CPU tensors too, contiguous or not, and over several slabs.
    monkeypatch.setattr(copying, "SLAB_BYTES", 1000)
    for tensor in (random_bits((31, 33), torch.float32, 13), random_bits((31, 33), torch.bfloat16, 14).t()):
        destination = memoryview(bytearray(tensor.numel() * tensor.element_size()))
        reached: list[int] = []
        digest = copying._copy_from_device(tensor, destination, reached.append)
        assert bytes(destination) == bits(tensor)
        assert digest == xxhash.xxh3_128_digest(bits(tensor))
        assert reached == [*range(1000, destination.nbytes, 1000), destination.nbytes]


def test_padding_is_zero_and_nothing_beyond_the_payload_is_touched() -> None:
    tensors = {"a": random_bits((3,), torch.uint8, 15), "b": random_bits((), torch.float64, 16), "c": random_bits((64,), torch.uint8, 17)}
    plan = plan_of(tensors)
    out = torch.full((plan.num_bytes + 100,), 0xEE, dtype=torch.uint8)
    pack(tensors.items(), plan, out)
    expected = b"".join(bits(tensor) + bytes(-len(bits(tensor)) % ALIGN) for tensor in tensors.values())
    assert bytes(out.numpy().data) == expected + b"\xee" * 100


BUCKETED = {
    "small": random_bits((10,), torch.float32, 18),
    "equal to the bucket": random_bits((1 << 17,), torch.uint8, 19),
    "larger than the bucket": random_bits((5 << 17,), torch.uint8, 20),
    "strided and larger": random_bits((1 << 17, 3), torch.uint8, 21).t(),
    "empty": torch.empty(0),
    "last": random_bits((7,), torch.int64, 22),
}


@pytest.mark.parametrize("progress_bytes", [1, 64, 1 << 17, 1 << 40])
def test_progress_tells_only_of_bytes_that_are_final(progress_bytes: int) -> None:
    final, plan, _ = packed(BUCKETED)
    out = torch.full((plan.num_bytes,), 0xEE, dtype=torch.uint8)
    told: list[int] = []

    def on_progress(position: int) -> None:
        assert torch.equal(out[:position], final[:position])
        told.append(position)

    pack(BUCKETED.items(), plan, out, on_progress=on_progress, progress_bytes=progress_bytes)
    assert told == sorted(set(told))
    assert told[-1] == plan.num_bytes
    assert all(later - earlier >= progress_bytes for earlier, later in itertools.pairwise(told[:-1]))
    if progress_bytes == 1 << 17:
        inside = plan.tensors[2]
        assert any(inside.offset < position < inside.offset + inside.nbytes for position in told), "a large tensor shows progress inside"


def test_2000_tiny_tensors_make_a_bounded_number_of_calls() -> None:
    tensors = {f"t{i}": torch.full((3,), float(i)) for i in range(2000)}
    plan = plan_of(tensors)
    told: list[int] = []
    pack(tensors.items(), plan, torch.empty(plan.num_bytes, dtype=torch.uint8), on_progress=told.append, progress_bytes=1 << 20)
    assert told == [plan.num_bytes]
    assert_arrives(tensors)


def test_progress_ends_at_the_payloads_size_even_if_that_is_zero() -> None:
    told: list[int] = []
    plan = plan_of({"empty": torch.empty(0, 3)})
    assert plan.num_bytes == 0
    assert pack([("empty", torch.empty(0, 3))], plan, torch.empty(0, dtype=torch.uint8), on_progress=told.append).num_tensors == 1
    assert told == [0]


@pytest.mark.parametrize("progress_bytes", [0, -1, True, 1.5, None])
def test_a_bucket_that_is_no_positive_int_is_refused(progress_bytes: object) -> None:
    plan = plan_of(BUCKETED)
    with pytest.raises(ConfigError, match="progress_bytes"):
        pack(BUCKETED.items(), plan, torch.empty(plan.num_bytes, dtype=torch.uint8), progress_bytes=progress_bytes)  # type: ignore[arg-type]


def test_a_payload_that_is_unfit_is_refused() -> None:
    plan = plan_of(BUCKETED)
    right = torch.empty(plan.num_bytes, dtype=torch.uint8)
    for out in (
        right.view(torch.int8),
        right.view(2, -1),
        torch.empty(2 * plan.num_bytes, dtype=torch.uint8)[::2],
        right.to("meta"),
        bytearray(10),
    ):
        with pytest.raises(ConfigError, match="one-dimensional, contiguous uint8"):
            pack(BUCKETED.items(), plan, out)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no room"):
        pack(BUCKETED.items(), plan, right[:-1])
    with pytest.raises(ConfigError, match="'last' ends at byte"):
        view(right[:-64], plan.tensors[-1])


def test_the_digest_attests_what_lies_in_the_payload_though_the_source_changes_meanwhile() -> None:
    tensor = torch.zeros(1 << 20, dtype=torch.uint8)
    plan = plan_of({"a": tensor})
    out = torch.empty(plan.num_bytes, dtype=torch.uint8)
    before = weights_digest({"a": tensor})
    result = pack([("a", tensor)], plan, out, on_progress=lambda position: tensor.fill_(1), progress_bytes=1 << 18)
    assert len(out.unique()) == 2, "the payload is torn"
    assert result.digest == payload_digest(out, plan)
    assert result.digest not in (before, weights_digest({"a": tensor}))


def test_iteration_that_disagrees_with_the_plan_is_an_error_that_names_the_tensor() -> None:
    plan = plan_of(BUCKETED)
    out = torch.empty(plan.num_bytes, dtype=torch.uint8)
    with pytest.raises(ConfigError, match="'equal to the bucket'"):
        pack(list(BUCKETED.items())[:1], plan, out)


def test_torchs_thread_setting_is_never_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(num_threads: int) -> None:
        raise AssertionError("the setting is global, and threads that start meanwhile inherit it")

    monkeypatch.setattr(torch, "set_num_threads", refuse)
    before = torch.get_num_threads()
    assert_arrives(BUCKETED | LAYOUTS)
    assert torch.get_num_threads() == before


def test_blocks_are_copied_and_hashed_without_releasing_the_gil() -> None:
    # Threads that want the GIL get it only if it is given up, for none of them asks for it within 1000 s.
    source = memoryview(bytearray(4 << 20))
    destination = memoryview(bytearray(4 << 20))
    turns = [0]
    done = False

    def take_turns() -> None:
        while not done:
            turns[0] += 1
            time.sleep(0)  # gives the GIL back at once

    threads = [threading.Thread(target=take_turns, daemon=True) for _ in range(8)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        for thread in threads:
            thread.start()
        time.sleep(0.01)
        before = turns[0]
        for _ in range(40):
            copying.copy_blocks(source, destination)
        during = turns[0] - before
    finally:
        done = True
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()
    assert before > 0
    assert during == 0


def test_the_digest_is_taken_over_the_destination() -> None:
    # Overlapping memory: writing the destination changes the source, as a trainer that steps while its weights are copied does.
    memory = memoryview(bytearray(bits(random_bits((3 * copying.BLOCK_BYTES + 1,), torch.uint8, 24))))
    source, destination = memory[:-1], memory[1:]
    digest = copying.copy_blocks(source, destination)
    assert digest == xxhash.xxh3_128_digest(destination)
    assert digest != xxhash.xxh3_128_digest(source)


def test_reading_a_view_warns_of_nothing() -> None:
    tensors = {"a": random_bits((4,), torch.float32, 23)}
    out, plan, _ = packed(tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        view(out, plan.tensors[0])[0] = 1.0
    assert out.view(torch.float32)[0] == 1.0, "a view shares the payload's memory"
