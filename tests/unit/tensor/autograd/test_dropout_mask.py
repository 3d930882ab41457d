"""Masks of dropout: the same wherever they are made, and as random as they should be."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from parity.kernels import Kernels
from parity.live_bytes import LiveBytes
from plait.errors import ModelError
from plait.tensor.dropout_mask import (
    BLOCK,
    BLOCK_ON_ACCELERATORS,
    DimPart,
    DimRanges,
    keep_mask,
    keep_mask_of_ranges,
)

CPU = torch.device("cpu")
MANY = 200_000
KEY = 0x0123456789ABCDEF
GOLDEN = [
    "110101110011101001101101",
    "001110010011111000101110",
    "110011001011011001101010",
    "011101101101000101011100",
]
"""Of `KEY`, 4 × 24 with p = 0.5."""


def kept(key: int, *shape: int, p: float = 0.5, spans: dict[int, DimPart] | None = None) -> Tensor:
    return keep_mask(key, shape, p, spans or {}, CPU)


def correlation(one: Tensor, other: Tensor) -> float:
    """Of two masks, times the root of their size: normal, of spread 1, where they are independent."""
    stacked = torch.stack([one.flatten(), other.flatten()]).double()
    return float(torch.corrcoef(stacked)[0, 1]) * one.numel() ** 0.5


def test_a_small_mask_never_changes() -> None:
    """Runs are resumed by it: whoever changes the generator changes every run."""
    rows = ["".join("01"[bit] for bit in row) for row in kept(KEY, 4, 24, p=0.5).int().tolist()]
    assert rows == GOLDEN


def test_a_dropout_mask_is_drawn_by_the_described_generator() -> None:
    """In numpy, whose whole numbers have no sign."""
    with np.errstate(over="ignore"):
        index = np.arange(1000, dtype=np.uint64)
        bits = index * np.uint64(0x9E3779B97F4A7C15) + np.uint64(KEY)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits ^= np.uint64(KEY)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        bits ^= bits >> np.uint64(31)
    for p in (0.1, 0.5, 0.9):
        # Dropped are the lowest of all numbers of 64 bits, as they are ordered with a sign.
        expected = bits.astype(np.int64) >= int(p * 2**64) - 2**63
        assert kept(KEY, 1000, p=p).tolist() == expected.tolist()


@st.composite
def parts(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, int]]]:
    """A shape, and a part of each of its dims."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    ends = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    return shape, [(start, stop) for start, stop in ends]


@given(parts(), st.integers(-(2**63), 2**63 - 1), st.sampled_from([0.1, 0.5, 0.9]))
def test_the_mask_of_a_slice_is_the_slice_of_the_whole_mask(
    cut: tuple[list[int], list[tuple[int, int]]], key: int, p: float
) -> None:
    shape, ends = cut
    whole = kept(key, *shape, p=p)
    sizes = [stop - start for start, stop in ends]
    spans = {
        dim if dim % 2 else dim - len(shape): DimPart(start, size)
        for dim, ((start, _), size) in enumerate(zip(ends, shape, strict=True))
    }
    expected = whole[tuple(slice(start, stop) for start, stop in ends)]
    assert torch.equal(kept(key, *sizes, p=p, spans=spans), expected)


@st.composite
def spaced(draw: st.DrawFn) -> tuple[list[int], list[list[range]]]:
    """A shape, and some ranges of each of its dims, with steps."""
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    ranges = [
        draw(st.lists(st.builds(range, *[st.integers(0, size)] * 2, st.integers(1, 4)), max_size=3))
        for size in shape
    ]
    return shape, ranges


@given(spaced(), st.sampled_from([3, 2**15]))
def test_the_mask_of_ranges_with_steps_is_that_part_of_the_whole_mask(
    cut: tuple[list[int], list[list[range]]], block: int
) -> None:
    shape, ranges = cut
    expected = kept(KEY, *shape)
    for dim, each in enumerate(ranges):
        held = torch.tensor([position for one in each for position in one], dtype=torch.int64)
        expected = expected.index_select(dim, held)
    whole = {dim: DimRanges(each, shape[dim]) for dim, each in enumerate(ranges)}
    with patch.dict(BLOCK, cpu=block):
        assert torch.equal(keep_mask_of_ranges(KEY, expected.shape, 0.5, {}, whole, CPU), expected)


@pytest.mark.parametrize("shape", [(3, BLOCK["cpu"] + 5), (BLOCK["cpu"] // 4, 3, 10)])
def test_the_block_size_changes_no_bit_of_a_mask(shape: tuple[int, ...]) -> None:
    whole = kept(KEY, *shape)
    half = shape[-1] // 2
    spans = {len(shape) - 1: DimPart(half, shape[-1])}
    assert torch.equal(kept(KEY, *shape[:-1], shape[-1] - half, spans=spans), whole[..., half:])
    assert torch.equal(kept(KEY, 1, *shape[1:], spans={0: DimPart(2, 0)}), whole[2:3])


@example(([3, 9], [(0, 3), (1, 6)]), 4)  # a part of a block, then whole ones again
@given(parts(), st.sampled_from([1, 2, 3, 7, 16, 100]))
def test_block_sizes_that_do_not_divide_the_rows_change_no_bit_of_a_mask(
    cut: tuple[list[int], list[tuple[int, int]]], block: int
) -> None:
    """Rows that blocks do not divide, blocks of several rows, blocks within a row."""
    shape, ends = cut
    sizes = [stop - start for start, stop in ends]
    spans = {
        dim: DimPart(start, size) for dim, ((start, _), size) in enumerate(zip(ends, shape, strict=True))
    }
    expected = kept(KEY, *sizes, spans=spans)
    with patch.dict(BLOCK, cpu=block):
        assert torch.equal(kept(KEY, *sizes, spans=spans), expected)


@pytest.mark.parametrize(
    ("shape", "spans"),
    [
        ((4, 2**21), {0: DimPart(4, 0)}),
        ((4, 2**11, 2**10), {0: DimPart(4, 0), 2: DimPart(2**10, 2**11)}),
        ((2, 4, 2**10, 2**10), {0: DimPart(2, 0), 1: DimPart(4, 8), 3: DimPart(0, 2**12)}),
    ],
)
def test_a_mask_takes_fourteen_kernels_a_block(shape: tuple[int, ...], spans: dict[int, DimPart]) -> None:
    """Of two million elements on a GPU, however many dims are in parts; and a few for the mask."""
    with patch.dict(BLOCK, cpu=BLOCK_ON_ACCELERATORS), Kernels() as kernels:
        mask = kept(KEY, *shape, spans=spans)
    assert kernels.count <= 14 * (mask.numel() // 2**21) + 8
    assert torch.equal(mask, kept(KEY, *shape, spans=spans))


def test_making_a_mask_takes_at_most_three_int64_temporaries_a_block() -> None:
    """To three numbers of 64 bits for each element of a block."""
    live, size = LiveBytes(), 2**18
    with patch.dict(BLOCK, cpu=2**12), live:
        live.most = 0
        kept(KEY, 4, size // 4, spans={1: DimPart(5, size)})
    assert live.most is not None
    assert live.most - size <= 3 * 8 * 2**12
    assert 3 * 8 * BLOCK_ON_ACCELERATORS <= 64 * 2**20


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9, 0.999])
def test_the_dropped_share_of_a_mask_is_p(p: float) -> None:
    dropped = MANY - int(kept(KEY, MANY, p=p).sum())
    assert abs(dropped - p * MANY) < 5 * (p * (1 - p) * MANY) ** 0.5


def test_a_mask_with_p_0_keeps_all_and_with_p_1_drops_all() -> None:
    assert kept(KEY, 1000, p=0.0).all()
    assert not kept(KEY, 1000, p=1.0).any()
    assert not kept(KEY, 1000, p=1.0 - 2**-53).any()
    assert kept(KEY, 1000, p=5e-324).all()
    assert kept(KEY, 0, 3).shape == (0, 3)
    assert kept(KEY).shape == ()


def test_masks_of_neighbouring_elements_rows_and_keys_are_uncorrelated() -> None:
    whole = kept(KEY, 400, 500)
    assert abs(correlation(whole[:-1], whole[1:])) < 5
    assert abs(correlation(whole[:, :-1], whole[:, 1:])) < 5
    for other in (KEY + 1, ~KEY, KEY ^ (1 << 62), -KEY):
        assert abs(correlation(whole, kept(other, 400, 500))) < 5


def test_bytes_of_a_mask_are_uniform() -> None:
    """Eight neighbours take all 256 patterns equally often: chi² with 255 degrees of freedom."""
    patterns = (kept(KEY, MANY, 8).int() * (2 ** torch.arange(8))).sum(1)
    counts = torch.bincount(patterns, minlength=256).double()
    expected = MANY / 256
    assert 150 < float(((counts - expected) ** 2 / expected).sum()) < 380


def test_masks_of_keys_a_golden_ratio_step_apart_are_uncorrelated_when_shifted() -> None:
    """The numbers of key + k · golden are those of key, k places on, but for the second use of the key."""
    golden = 0x9E3779B97F4A7C15 - 2**64
    shifted = kept((KEY + golden + 2**63) % 2**64 - 2**63, MANY - 1)
    assert abs(correlation(shifted, kept(KEY, MANY)[1:])) < 5


def test_on_meta_a_mask_is_not_computed() -> None:
    mask = keep_mask(KEY, (2**20, 2**20), 0.5, {1: DimPart(1, 2**21)}, torch.device("meta"))
    assert (mask.shape, mask.dtype, mask.is_meta) == ((2**20, 2**20), torch.bool, True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_makes_the_masks_of_a_cpu() -> None:
    shape, spans = (7, 3, 2**16), {0: DimPart(3, 0), 2: DimPart(5, 2**17)}
    for key in (KEY, -KEY, 0):
        on_gpu = keep_mask(key, shape, 0.3, spans, torch.device("cuda"))
        assert torch.equal(on_gpu.cpu(), keep_mask(key, shape, 0.3, spans, CPU))


@pytest.mark.parametrize(
    ("spans", "told"),
    [
        ({2: DimPart(0, 4)}, "a part of its dim 2, which it does not have"),
        ({1: DimPart(0, 6), -1: DimPart(0, 6)}, "two parts of one dim, among the dims 1, -1"),
        ({1: DimPart(2, 4)}, "elements 2 … 4 of dim 1, whose whole size is 4"),
        ({1: DimPart(0, 4, 2)}, "elements 0 … 4 of dim 1, whose whole size is 4"),
    ],
)
def test_a_mask_of_a_slice_outside_the_tensor_is_refused(spans: dict[int, DimPart], told: str) -> None:
    with pytest.raises(ModelError, match=told):
        kept(KEY, 2, 3, spans=spans)
