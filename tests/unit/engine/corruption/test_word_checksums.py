"""Each bit of a tensor counts in its word sums, whatever its dtype, shape, strides and place in memory."""

from __future__ import annotations

import random

import pytest
import torch
from flipped_bits import flipped
from torch import Tensor

from plait.engine.corruption.word_checksums import SMALL_BYTES, WordChecksums

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8, torch.float16)
LARGE = SMALL_BYTES + 3


def tensors() -> dict[str, Tensor]:
    flat = torch.arange(3 * LARGE, dtype=torch.float32)
    made = {str(dtype): torch.ones(LARGE, dtype=dtype) for dtype in DTYPES}
    return made | {
        "scalar": torch.tensor(3.0),
        "small": torch.ones(5, 3, dtype=torch.bfloat16),
        "at an odd place": flat[1 : 1 + LARGE],
        "bytes at an odd place": torch.zeros(3 * LARGE, dtype=torch.uint8)[3 : 3 + LARGE],
        "transposed": torch.ones(90, 70).T,
        "channels last": torch.ones(3, 5, 20, 30).to(memory_format=torch.channels_last),
    }


@pytest.mark.parametrize("name", tensors())
def test_every_flipped_bit_changes_the_numbers(name: str) -> None:
    tensor = tensors()[name]
    sums, drawn = WordChecksums([torch.ones(3), tensor]), random.Random(name)
    before = sums.compute()
    ends = [0, 1, 7, 8, tensor.nbytes - 9, tensor.nbytes - 8, tensor.nbytes - 1]
    places = [one for one in ends if 0 <= one < tensor.nbytes]
    for byte in [*places, *(drawn.randrange(tensor.nbytes) for _ in range(20))]:
        for bit in range(8):
            with flipped(tensor, byte, bit):
                (different,) = (sums.compute() != before).nonzero().flatten().tolist()
            assert sums.owners[different] == 1
    assert torch.equal(sums.compute(), before)


def test_a_tensor_with_gaps_is_copied_and_counts_too() -> None:
    whole = torch.ones(100, 60)
    sums = WordChecksums([whole[:, :30]])
    before = sums.compute()
    with flipped(whole, 4 * 60 + 3, 7):
        assert sums.compute() != before
    with flipped(whole, 4 * 59, 7):  # between its rows
        assert sums.compute() == before


def test_a_flip_of_any_bit_of_any_word_is_no_multiple_of_two_to_the_64() -> None:
    """The sum of words is that of whole numbers modulo 2^64, also where it overflows."""
    words = torch.randint(-(2**62), 2**62, (SMALL_BYTES,), dtype=torch.int64)
    sums = WordChecksums([words])
    before = int(sums.compute())
    assert before == (sum(words.tolist()) + 2**63) % 2**64 - 2**63
    for bit in range(64):
        change = -(2**bit) if words[5] >> bit & 1 else 2**bit
        with flipped(words, 40 + bit // 8, bit % 8):
            assert (int(sums.compute()) - before - change) % 2**64 == 0
        assert change % 2**64 != 0


def test_each_byte_is_read_once() -> None:
    every = list(tensors().values())
    sums, storages = WordChecksums(every), {one.untyped_storage().data_ptr() for one in every}
    views = [*sums._sums, *sums._kept]
    read = [one.nbytes for one in views if one.untyped_storage().data_ptr() in storages]
    assert not sums._copied
    assert sum(read) == sum(one.nbytes for one in every)
    assert sum(one.nbytes for one in views) - sum(read) < 8 * 3 * len(every)  # zeros up to whole words


def test_tensors_of_a_few_words_are_kept_and_others_are_one_number() -> None:
    sums = WordChecksums([torch.ones(2), torch.ones(LARGE), torch.ones(4)])
    assert len(sums.compute()) == 1 + 1 + 1 + 2
    assert sums.owners == [1, 0, 1, 2, 2]  # the large one's last bytes too
