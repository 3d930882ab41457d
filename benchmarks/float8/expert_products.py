"""How long do products of experts take in float8, and casts of rows? Prints the last table of README.md.

Each figure is the mean of twenty calls, one after the other, of one product of all experts.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from plait.ranks.accelerator import default_device, is_accelerator
from plait.tensor.experts.grouped_float8_products import grouped_float8_product
from plait.tensor.experts.grouped_products import Groups, grouped_product
from plait.tensor.float8.cast import ScaledMatrix, cast_by, factor_of, largest_of
from plait.tensor.float8.recipes import RECIPES

ROW = RECIPES["float8-rowwise-gw"].input
CASES = {
    "large": ((8, 4096, 2048, 2816), (16, 4096, 4096, 4096), (64, 1024, 2048, 2048)),
    "small": ((4, 16, 64, 32),),
}
"""Experts, rows of each, features of the input and of the output."""
CALLS = 20


def milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the mean time of a call, after three that do not count."""
    for _ in range(3):
        call()
    return _seconds(call, device) / CALLS * 1e3


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    synchronize = torch.cuda.synchronize if is_accelerator(device) else (lambda: None)
    synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    synchronize()
    return time.perf_counter() - start


def cast_rows(rows: Tensor, dim: int) -> tuple[Tensor, ScaledMatrix]:
    """Return the factors of rows along `dim`, and the rows in float8."""
    factor = factor_of(largest_of(rows, "row", dim), ROW)
    return factor, cast_by(rows, factor, ROW)


def timed(experts: int, each: int, features: int, outputs: int, device: torch.device) -> list[float]:
    """Return the milliseconds of both products, of the largest values, and of both casts."""
    sizes = (each,) * experts
    groups = Groups(sizes, torch.tensor(sizes).cumsum(0).int().to(device))
    rows = torch.randn(sum(sizes), features, device=device).bfloat16()
    weights = torch.randn(experts, outputs, features, device=device).bfloat16()
    (of_rows, in_float8), (of_weights, cast) = cast_rows(rows, 1), cast_rows(weights, 2)
    matrices = ScaledMatrix(cast.data.mT, cast.scale.mT)
    calls: list[Callable[[], object]] = [
        lambda: grouped_product(rows, weights.mT, groups),
        lambda: grouped_float8_product(in_float8, matrices, groups, torch.bfloat16),
        lambda: largest_of(rows, "row", 1),
        lambda: cast_by(rows, of_rows, ROW),
        lambda: cast_by(weights, of_weights, ROW),
    ]
    return [milliseconds(call, device) for call in calls]


def main() -> None:
    """Time each case and print its row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", choices=CASES, default="large", help="small ones to try the script")
    columns = ["experts × rows, features", "bf16", "float8", "largest values of rows", "rows", "weights"]
    print(f"| {' | '.join(columns)} |\n|---|{'---|' * (len(columns) - 1)}")
    for experts, each, features, outputs in CASES[parser.parse_args().sizes]:
        found = timed(experts, each, features, outputs, default_device())
        figures = " | ".join(f"{one:.2f}" for one in found)
        print(f"| {experts} × {each:,}, {features:,} → {outputs:,} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
