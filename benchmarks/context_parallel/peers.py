"""The peers: GPT training on long sequences in plain PyTorch, on one process or a ring. Nothing of plait.

The ring is the usual one: consecutive positions, keys and values passed on to the next rank, explicit scores
of each block in float32, merged by log-sum-exp; a block of later positions is skipped. In the backward keys
and values go around again, with their gradients. Prints the median seconds of a step. The work is that of
`run.py`.
"""

import argparse
import math
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

HIDDEN, HEADS, BLOCKS, VOCAB = 512, 8, 8, 8192


class Ring(torch.autograd.Function):
    """Causal attention over all ranks' positions."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        out, lse, here = None, None, torch.stack([key, value])
        for step in range(ranks):
            pending, following = passed_on(here) if step + 1 < ranks else ([], here)
            source = (rank - step) % ranks
            if source <= rank:
                part, part_lse = block(query, *here, causal=source == rank)
                out, lse = merged(out, lse, part, part_lse)
            for one in pending:
                one.wait()
            here = following
        assert out is not None
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, out, lse = ctx.saved_tensors
        rank, ranks = dist.get_rank(), dist.get_world_size()
        of_query, here = torch.zeros_like(query), torch.stack([key, value])
        of_keys = torch.zeros_like(here)
        row = (gradient * out).sum(-1, keepdim=True)
        for step in range(ranks):
            pending, following = passed_on(here) if step + 1 < ranks else ([], here)
            source = (rank - step) % ranks
            if source <= rank:
                scores = masked_scores(query, here[0], causal=source == rank)
                weights = torch.exp(scores - lse.unsqueeze(-1))
                of_scores = (
                    weights * (gradient @ here[1].transpose(-1, -2) - row) / math.sqrt(query.shape[-1])
                )
                of_query += of_scores @ here[0]
                of_keys[0] += of_scores.transpose(-1, -2) @ query
                of_keys[1] += weights.transpose(-1, -2) @ gradient
            for one in pending:
                one.wait()
            here = following
            pending, of_keys = passed_on(of_keys)
            for one in pending:
                one.wait()
        return of_query, of_keys[0], of_keys[1]


def passed_on(tensor: Tensor) -> tuple[list[dist.Work], Tensor]:
    """Start sending to the next rank, and receiving from the one before."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(tensor)
    operations = [
        dist.P2POp(dist.isend, tensor, (rank + 1) % ranks),
        dist.P2POp(dist.irecv, received, (rank - 1) % ranks),
    ]
    return dist.batch_isend_irecv(operations), received


def masked_scores(query: Tensor, key: Tensor, causal: bool) -> Tensor:
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores


def block(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    scores = masked_scores(query, key, causal).float()
    lse = scores.logsumexp(-1)
    return torch.exp(scores - lse.unsqueeze(-1)) @ value, lse


def merged(out: Any, lse: Any, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    if out is None:
        return part, part_lse
    out = out - torch.sigmoid(part_lse - lse).unsqueeze(-1) * (out - part)
    return out, lse - functional.logsigmoid(lse - part_lse)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.mix = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(HIDDEN, dim=-1)
        )
        if dist.is_initialized():
            mixed = Ring.apply(query.contiguous(), key.contiguous(), value.contiguous())
        else:
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, context: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(context, HIDDEN)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(positions)
        return self.head(self.norm(self.blocks(x)))


def train_step(model: GPT, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
    """One sequence; each rank has consecutive positions of it."""
    length = tokens.shape[1] - 1
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    own = slice(rank * length // ranks, (rank + 1) * length // ranks)
    logits = model(tokens[:, :-1][:, own], torch.arange(length)[own])
    loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:][:, own].flatten(), reduction="sum")
    (loss / length).backward()
    if ranks > 1:
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        for gradient, part in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = GPT(arguments.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    seconds = []
    for _ in range(arguments.steps):
        tokens = torch.randint(0, VOCAB, (1, arguments.length + 1))
        start = time.perf_counter()
        train_step(model, optimizer, tokens)
        seconds.append(time.perf_counter() - start)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(statistics.median(seconds[1:]))


if __name__ == "__main__":
    main()
