"""The peer: the same training with PyTorch's own tensor parallelism, on two ranks with one thread each.

`parallelize_module` cuts the model of `two_ranks/plain.py`. Nothing of plait. Prints the median seconds of a
step. Query, key and value are one linear, as in `plain.py`, whose rows stand head by head, so that an even
cut gives each rank whole heads; `--separate` makes three linears of them, and `--documented` cuts these as
PyTorch's tutorial does, each by itself, so that each sums its own part of the input's gradient.
"""

import argparse
import statistics
import tempfile
import time

import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional

HIDDEN, HEADS, BLOCKS, VOCAB, CONTEXT, BATCH = 512, 8, 8, 8192, 256, 8
RANKS = 2


class Fused(nn.Module):
    """Query, key and value in one linear: its output features are [heads, three, features of a head]."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.mix = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (-1, 3, HIDDEN // HEADS)).movedim(-2, 0)
        query, key, value = parts.transpose(-3, -2)
        return self.mix(attend(query, key, value))


class Separate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.mix = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            linear(x).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        return self.mix(attend(query, key, value))


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return mixed.transpose(1, 2).flatten(2)


class Block(nn.Module):
    def __init__(self, separate: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention = Separate() if separate else Fused()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, separate: bool) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(CONTEXT, HIDDEN)
        self.blocks = nn.Sequential(*(Block(separate) for _ in range(BLOCKS)))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def parallelize(model: GPT, mesh: DeviceMesh, documented: bool) -> None:
    """Partition `model`; norms and positions stay plain tensors, the same on every rank."""
    plan: dict[str, ParallelStyle] = {
        "token": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.attention.mix": RowwiseParallel(),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
        "head": ColwiseParallel(use_local_output=False),
    }
    if isinstance(model.blocks[0].attention, Separate):
        if not documented:
            # One DTensor for all three: their gradients are added before they are summed over the ranks.
            plan["blocks.*.attention"] = PrepareModuleInput(
                input_layouts=Replicate(), desired_input_layouts=Replicate()
            )
        plan |= {f"blocks.*.attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
    else:
        plan["blocks.*.attention.qkv"] = ColwiseParallel()
    parallelize_module(model, mesh, plan)


def groups(model: GPT) -> list[list[nn.Parameter]]:
    """The cut parameters and the plain ones: clipping and fused AdamW take no mixture of both."""
    parameters = list(model.parameters())
    return [[p for p in parameters if isinstance(p, DTensor) is cut] for cut in (True, False)]


def clip(model: GPT, limit: float) -> None:
    """`nn.utils.clip_grad_norm_` for a mixture: the norm of both groups together."""
    gradients = [[p.grad for p in group if p.grad is not None] for group in groups(model)]
    cut, plain = (nn.utils.get_total_norm(group) for group in gradients)
    assert isinstance(cut, DTensor)
    total = torch.hypot(cut.full_tensor(), plain)
    for group in groups(model):
        nn.utils.clip_grads_with_norm_(group, limit, total)


def step(model: GPT, optimizer: torch.optim.Optimizer, tokens: Tensor) -> list[Tensor]:
    """One step; the losses of its micro-batches."""
    losses = []
    for row in tokens.split(1):
        with loss_parallel():
            logits = model(row[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), row[:, 1:].flatten()) / len(tokens)
            loss.backward()
        losses.append(loss.detach())
    clip(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return losses


def rank_main(rank: int, folder: str, steps: int, separate: bool, documented: bool) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = GPT(separate or documented)
    parallelize(model, init_device_mesh("cpu", (RANKS,)), documented)
    optimizer = torch.optim.AdamW(
        [{"params": group} for group in groups(model)], lr=1e-4, weight_decay=0.1, fused=True
    )
    seconds = []
    for _ in range(steps):
        tokens = torch.randint(0, VOCAB, (BATCH, CONTEXT + 1))
        start = time.perf_counter()
        step(model, optimizer, tokens)
        seconds.append(time.perf_counter() - start)
    if rank == 0:
        print(statistics.median(seconds[1:]))
    distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--separate", action="store_true", help="query, key, value: three linears")
    parser.add_argument("--documented", action="store_true", help="three linears, each cut by itself")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options = (folder, arguments.steps, arguments.separate, arguments.documented)
        multiprocessing.spawn(rank_main, args=options, nprocs=RANKS)


if __name__ == "__main__":
    main()
