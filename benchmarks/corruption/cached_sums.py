"""Do sums cost less where the update is done block by block, each of which a cache keeps meanwhile?

    .venv/bin/python benchmarks/corruption/cached_sums.py [--rounds 25]

AdamW's fused update of the matrices of a small GPT, with sums of what it reads before and of what it writes
after: of everything at once, as the checks do; the same in one call for each kind of tensor; and in blocks of
so many elements, whose sums are taken right before and after their own update. One thread; the variants in
turn, in the processor's seconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

SIZES = [2048 * 256, 2048 * 256, *[3 * 256**2, 256**2, 4 * 256**2, 4 * 256**2] * 4]
BLOCKS = (2**14, 2**15, 2**16, 2**17)
Tensors = Sequence[Sequence[Tensor]]
"""Parameters, gradients, and both moments."""


def update(tensors: Tensors) -> None:
    """Update parameters and moments in one call, as `torch.optim.AdamW` with `fused=True` does."""
    steps = [torch.tensor(3.0)] * len(tensors[0])
    options = {"beta1": 0.9, "beta2": 0.999, "weight_decay": 0.1, "eps": 1e-8}
    flags = {"amsgrad": False, "maximize": False}
    torch._fused_adamw_(*tensors, [], steps, lr=1e-4, **options, **flags)


def update_with_sums(blocks: Sequence[Tensors], *, before: bool, after: bool) -> None:
    """Update block by block, with sums before of all tensors, and after of those that are written."""
    for parameters, gradients, *moments in blocks:
        if before:
            sums(parameters, gradients, *moments)
        update((parameters, gradients, *moments))
        if after:
            sums(parameters, *moments)


def update_with_flat_sums(tensors: Tensors, flat: Sequence[Tensor]) -> None:
    """Update everything at once, with sums before and after of the `flat` tensors, which `tensors` view."""
    sums(flat)
    update(tensors)
    sums([flat[0], *flat[2:]])


def sums(*tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the sums of the words of tensors."""
    return [one.view(torch.int64).sum() for each in tensors for one in each]


def blocks_of(tensors: Tensors, size: int) -> Iterator[Tensors]:
    """Yield blocks of at most `size` elements of each four tensors that belong together."""
    for four in zip(*tensors, strict=True):
        for block in zip(*(one.split(size) for one in four), strict=True):
            yield [[one] for one in block]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=25)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    flat = [1e-2 * torch.randn(sum(SIZES)) for _ in range(4)]
    flat[3].abs_()
    tensors = [one.split(SIZES) for one in flat]
    other = torch.zeros(2**24)  # which other parts of a step would have in the cache
    ways: dict[str, Callable[[], None]] = {
        "no sums": partial(update, tensors),
        "sums of everything": partial(update_with_sums, [tensors], before=True, after=True),
        "the same, as four flat tensors": partial(update_with_flat_sums, tensors, flat),
    }
    for size in BLOCKS:
        blocks = [*blocks_of(tensors, size)]
        for text, before, after in (
            ("", False, False),
            (", sums after", False, True),
            (", sums", True, True),
        ):
            ways[f"blocks of {size:,}{text}"] = partial(update_with_sums, blocks, before=before, after=after)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            other.add_(1.0)
            begin = time.thread_time()
            way()
            taken[name].append(time.thread_time() - begin)
    print(f"{sum(SIZES):,} parameters in fp32\n\n| update | ms | more than without sums |\n|---|---|---|")
    for name, own in taken.items():
        more = statistics.median(mine - none for mine, none in zip(own, taken["no sums"], strict=True))
        print(f"| {name} | {1e3 * statistics.median(own):.1f} | {1e3 * more:.1f} |")


if __name__ == "__main__":
    main()
