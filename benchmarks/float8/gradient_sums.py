"""How wrong is a sum of gradients in float8, beside bf16 and fp32? Prints the second table of README.md.

The summands are real: gradients of one model for different micro-batches, as ranks of dp have them. They are
cast once and added in fp32, or added along a ring, where every rank casts the sum so far before it sends it.
The error is that of all hidden matrices together, ‖sum − exact‖ / ‖exact‖.
"""

import argparse
import sysconfig
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

import plait

MODEL = {"layers": 4, "hidden": 128, "heads": 4, "vocab": 256, "context": 128}
"""That of examples/demo.toml."""
COUNTS = (2, 8, 32, 128)
ROWS = 4
"""Sequences of a micro-batch."""

Round = Callable[[Tensor], Tensor]


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Yield random micro-batches of bytes of Python's standard library, and the bytes that follow."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, files))), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(text) - MODEL["context"] - 1, (ROWS, 1), generator=generator)
        rows = text[starts + torch.arange(MODEL["context"] + 1)]
        yield rows[:, :-1], rows[:, 1:].contiguous()


def gradients(steps: int) -> list[list[Tensor]]:
    """Return the gradients of all hidden matrices after `steps` steps, for each of many micro-batches."""
    plan = plait.Plan()
    engine = plait.parallelize(plait.models.gpt2(**MODEL), plan, plait.Mesh(plan), loss=plait.cross_entropy)
    optimizer = torch.optim.AdamW(engine.parameter_groups(weight_decay=0.1), lr=3e-3)
    drawn, found = batches(), []
    for inputs, targets in islice(drawn, steps):
        engine.forward_backward(inputs, targets)
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    for inputs, targets in islice(drawn, max(COUNTS)):
        engine.forward_backward(inputs, targets)
        matrices = [
            one for name, one in engine.named_parameters() if name.startswith("blocks") and one.dim() > 1
        ]
        found.append([one.grad.clone() for one in matrices])
        optimizer.zero_grad()
    return found


def cast(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """Return `tensor` after a cast to `dtype` and back; to 8 bits with one scale for the tensor."""
    limit = torch.finfo(dtype).max
    scale = limit / float(tensor.abs().max()) if dtype.itemsize == 1 else 1.0
    return (tensor * scale).clamp(-limit, limit).to(dtype).float() / scale


def cast_once(rounded: Round, summands: list[Tensor]) -> Tensor:
    """Return the sum in fp32 of summands that were cast."""
    return torch.stack([rounded(one) for one in summands]).sum(0)


def along_a_ring(rounded: Round, summands: list[Tensor]) -> Tensor:
    """Return the sum of the summands, of which each rank casts the sum so far."""
    total = rounded(summands[0])
    for one in summands[1:]:
        total = rounded(total + one)
    return total


def error(add: Callable[[list[Tensor]], Tensor], summands: list[list[Tensor]]) -> float:
    """Return the relative error of the sums of all matrices; `summands`: by micro-batch and matrix."""
    wrong = size = 0.0
    for of_matrix in zip(*summands, strict=True):
        exact = torch.stack(of_matrix).double().sum(0)
        wrong += float((add(list(of_matrix)).double() - exact).square().sum())
        size += float(exact.square().sum())
    return (wrong / size) ** 0.5


def main() -> None:
    """Print the errors for each number of summands."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    found = plait.launch(gradients, parser.parse_args().steps, ranks=1, threads=2)[0]
    print(f"| summed in | {' | '.join(f'{count} ranks' for count in COUNTS)} |")
    print(f"|---|{'---|' * len(COUNTS)}")
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    dtypes |= {"float8, e4m3": torch.float8_e4m3fn, "float8, e5m2": torch.float8_e5m2}
    for name, dtype in dtypes.items():
        for how, add in {"cast once, added in fp32": cast_once, "along a ring": along_a_ring}.items():
            errors = [error(partial(add, partial(cast, dtype)), found[:count]) for count in COUNTS]
            print(f"| {name}, {how} | {' | '.join(f'{one:.1e}' for one in errors)} |")


if __name__ == "__main__":
    main()
