"""The peer: GPT training as one writes it in plain PyTorch, in one process with one thread. Nothing of plait.

Prints the median seconds of a step. The work is that of `run.py`.
"""

import argparse
import statistics
import time

import torch
from torch import Tensor, nn
from torch.nn import functional

HIDDEN, HEADS, BLOCKS, VOCAB, CONTEXT, BATCH = 512, 8, 8, 8192, 256, 8


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
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(CONTEXT, HIDDEN)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def step(model: GPT, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
    for row in tokens.split(1):
        logits = model(row[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), row[:, 1:].flatten()) / len(tokens)
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tied", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(arguments.tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    seconds = []
    for _ in range(arguments.steps):
        tokens = torch.randint(0, VOCAB, (BATCH, CONTEXT + 1))
        start = time.perf_counter()
        step(model, optimizer, tokens)
        seconds.append(time.perf_counter() - start)
    print(statistics.median(seconds[1:]))


if __name__ == "__main__":
    main()
