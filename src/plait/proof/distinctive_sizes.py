"""Prime sizes of a layer's input, by which dims with positions of a sequence are recognised."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import chain, count, islice

import torch
from torch import Tensor, nn

from plait.errors import ModelError
from plait.tensor.layer_values import Value, map_tensors, tensors_of

SMALLEST_LENGTH = 5
"""Smaller primes divide too many sizes that a layer computes from others."""


@dataclass(frozen=True)
class DistinctiveSizes:
    """Two lengths and a number of rows: different primes that divide no other size of a layer."""

    lengths: tuple[int, int]
    """Up to the length of the given input where there are such primes, the largest first."""
    rows: int

    @staticmethod
    def of(path: str, module: nn.Module, like: Value) -> DistinctiveSizes:
        """Return sizes for the layer at `path` and an input like `like`.

        Raises ModelError unless all tensors in `like` with two or more dims have the same size in dim 1.
        """
        length, sizes = _length_of(path, like), set(_sizes(module, like))
        smaller = filter(_is_prime, range(length, SMALLEST_LENGTH - 1, -1))
        larger = filter(_is_prime, count(max(length + 1, SMALLEST_LENGTH)))
        first, second = islice(_without_multiples(chain(smaller, larger), sizes), 2)
        rows = next(_without_multiples(filter(_is_prime, count(3)), {first, second} | sizes))
        return DistinctiveSizes((first, second), rows)


def resized(like: Value, rows: int, length: int) -> Value:
    """Return leaves on the meta device with the structure and dtypes of `like` and other sizes.

    Dim 1 is `length`; dim 0 is `rows`, unless it is smaller than that of another tensor, as 1 may be.
    """
    most = max((tensor.shape[0] for tensor in tensors_of(like) if tensor.dim()), default=0)

    def empty(tensor: Tensor) -> Tensor:
        shape = list(tensor.shape)
        if shape and shape[0] == most:
            shape[0] = rows
        if len(shape) > 1:
            shape[1] = length
        learns = tensor.is_floating_point()
        return torch.empty(shape, dtype=tensor.dtype, device="meta", requires_grad=learns)

    return map_tensors(empty, like)


def _length_of(path: str, like: Value) -> int:
    lengths = {tensor.shape[1] for tensor in tensors_of(like) if tensor.dim() > 1}
    if len(lengths) != 1:
        raise ModelError(
            f"layer {path!r} is given tensors of shapes {[list(one.shape) for one in tensors_of(like)]}, but "
            "context parallelism cuts dim 1, the sequence: give it tensors [rows, length, ...] that agree in "
            "length, or set plan.cp to 1."
        )
    return lengths.pop()


def _sizes(module: nn.Module, like: Value) -> Iterator[int]:
    """Yield sizes in a layer: of its tensors, in its attributes, and of its input behind the sequence."""
    for tensor in tensors_of(like):
        yield from tensor.shape[2:]
    for child in module.modules():
        for tensor in (*child.parameters(recurse=False), *child.buffers(recurse=False)):
            yield from tensor.shape
        for value in vars(child).values():
            if isinstance(value, Tensor):
                yield from value.shape
            elif isinstance(value, int | tuple | list):
                numbers = (value,) if isinstance(value, int) else value
                yield from (number for number in numbers if isinstance(number, int))


def _without_multiples(primes: Iterator[int], sizes: Collection[int]) -> Iterator[int]:
    """Yield those of `primes` that divide none of `sizes`."""
    return (prime for prime in primes if all(size % prime for size in sizes if size))


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))
