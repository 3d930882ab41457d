"""Hashes of bits: any other bits give another hash, the same bits the same one, however they lie."""

from __future__ import annotations

from itertools import product
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor

from plait.ranks import Group, Mesh, Traffic
from plait.ranks.consistency_check import as_hex, require_same_bits, tensor_hash

ROW = 4096
"""Words of 8 bytes that the hash takes as one row."""
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
DTYPES += [torch.float8_e4m3fn, torch.int16]


def hash_of(tensor: Tensor) -> int:
    return int(tensor_hash(tensor))


def flipped(tensor: Tensor, *bits: int) -> Tensor:
    """With some bits the other way, counted over all bytes."""
    damaged = np.frombuffer(bytearray(tensor.contiguous().numpy().tobytes()), dtype=np.uint8)
    for bit in bits:
        damaged[bit // 8] ^= 1 << bit % 8
    return torch.from_numpy(damaged).view(tensor.dtype).view(tensor.shape)


def test_the_hash_of_a_tensor_stays_that_of_earlier_versions() -> None:
    ramp = torch.arange(3 * ROW + 5, dtype=torch.float32)
    assert as_hex(tensor_hash(ramp)) == "eecbe8ff132a9850"
    assert as_hex(tensor_hash(ramp.to(torch.int16))) == "3c5455a811526deb"
    assert hash_of(torch.zeros(7)) == hash_of(torch.empty(0)) == 0
    assert as_hex(torch.tensor(-1)) == "ffffffffffffffff"


def test_the_hash_of_a_tensor_is_an_int64_scalar_on_its_device() -> None:
    hashed = tensor_hash(torch.ones(3, requires_grad=True))
    assert (hashed.shape, hashed.dtype, hashed.requires_grad) == (torch.Size([]), torch.int64, False)


@given(words=some.integers(1, 5), place=some.data())
def test_a_flipped_bit_changes_the_hash(words: int, place: some.DataObject) -> None:
    tensor = torch.randn(words, dtype=torch.float64, generator=torch.Generator().manual_seed(words))
    bit = place.draw(some.integers(0, 64 * words - 1))
    assert hash_of(flipped(tensor, bit)) != hash_of(tensor)


def test_a_flipped_bit_in_any_row_changes_the_hash() -> None:
    for words in (1, ROW - 1, ROW, ROW + 1, 16 * ROW, 16 * ROW + 1, 40 * ROW + 3):
        tensor = torch.zeros(words, dtype=torch.float64)
        places = {0, 63, 64 * words - 1, 64 * words - 64, 32 * words}
        hashes = [hash_of(flipped(tensor, place)) for place in places]
        assert len({*hashes, hash_of(tensor)}) == len(places) + 1, words


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_changing_the_sign_of_any_two_elements_changes_the_hash(dtype: torch.dtype) -> None:
    """What a sum with odd factors alone would lose: 2^63 times two odd numbers is zero modulo 2^64."""
    tensor = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(dtype)
    seen = {hash_of(tensor), hash_of(-tensor)}
    for first in range(64):
        for second in range(first):
            changed = tensor.clone()
            changed[[first, second]] *= -1
            seen.add(hash_of(changed))
    assert len(seen) == 2 + 64 * 63 // 2


def test_rolling_a_tensor_changes_its_hash() -> None:
    tensor = torch.randn(2 * ROW + 9, generator=torch.Generator().manual_seed(0))
    rolled = [hash_of(tensor.roll(by)) for by in (0, 1, 2, ROW, 2 * ROW)]
    assert len(set(rolled)) == len(rolled)


def test_the_hash_tells_nan_payloads_and_signed_zeros_apart() -> None:
    nan, other = torch.tensor([float("nan")]), flipped(torch.tensor([float("nan")]), 0)
    assert other.isnan().all()
    assert hash_of(nan) == hash_of(nan.clone())
    assert hash_of(nan) != hash_of(other)
    assert hash_of(torch.tensor([0.0])) != hash_of(torch.tensor([-0.0]))


def test_strides_and_addresses_do_not_change_the_hash() -> None:
    for dtype, shape in product(DTYPES, [(), (0,), (1,), (3, 0), (7, 5), (2 * ROW + 1,)]):
        require_one_hash(dtype, shape)


def require_one_hash(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted = hash_of(tensor)
    strided = torch.stack([tensor, tensor.clone()], -1)[..., 0]
    assert hash_of(strided) == wanted
    for before in range(1, 9):
        memory = torch.empty(before + tensor.numel(), dtype=dtype)
        moved = memory[before:].view(shape).copy_(tensor)
        assert hash_of(moved) == wanted


def test_unguarded_ranks_compare_no_hashes() -> None:
    unguarded = Group("tp", (0, 1), 0, None, Traffic(), 1.0)
    require_same_bits(torch.ones(2), unguarded, "do it with")
    alone = Mesh(guarded=True).group("tp")
    require_same_bits(torch.ones(2), alone, "do it with")
    guarded = Group("tp", (0, 1), 0, Mock(), Traffic(), 1.0, guarded=True)
    require_same_bits(torch.ones(2, device="meta"), guarded, "do it with")
    assert guarded.traffic.snapshot() == unguarded.traffic.snapshot() == alone.traffic.snapshot() == {}
