"""Host time of packed documents: what a micro-batch costs before its first attention. Prints a table.

Each micro-batch has other documents, so that none of its plans is remembered; then the same once more.
"""

from __future__ import annotations

import statistics
import time

import torch

from plait.engine.local_batch import local_inputs
from plait.ranks.group import Group, Traffic
from plait.tensor.attention.key_exchange_plan import Mask, exchange_plan
from plait.tensor.running_sequence import ContextParallelism

SHAPES = ((1, 512, 1), (1, 512, 8), (1, 4096, 1), (1, 4096, 16), (1, 4096, 64), (4, 4096, 16), (4, 8192, 64))
"""Rows, tokens of a row, documents of a row."""
ROUNDS = 21


def milliseconds(ids: torch.Tensor, parallelism: ContextParallelism, mask: Mask) -> float:
    """Process time from document ids to the kernel calls of all layers with a mask."""
    start = time.process_time()
    (sequence,) = local_inputs([{"tokens": ids, "document_ids": ids}], parallelism).sequences
    assert sequence is not None
    exchange_plan(sequence, mask, torch.device("cpu"))
    return (time.process_time() - start) * 1e3


def drawn(rows: int, length: int, documents: int) -> torch.Tensor:
    """Ids of documents of random lengths, others in each row."""
    begins = torch.zeros(rows, length, dtype=torch.int64)
    for row in begins:
        row[1 + torch.randperm(length - 1)[: documents - 1]] = 1
    return begins.cumsum(1)


def main() -> None:
    """Measure each shape in turn, `ROUNDS` times, and print the medians."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ways = [(cp, window) for cp in (1, 4) for window in (None, 256)]
    heads = [f"cp {cp}, window {window}" if window else f"cp {cp}" for cp, window in ways]
    print("| rows × tokens, documents a row | " + " | ".join(heads) + " |\n|---" + "|---" * len(ways) + "|")
    for shape in SHAPES:
        cells = []
        for cp, window in ways:
            group = Group("cp", tuple(range(cp)), cp - 1, None, Traffic(), 0.0)
            parallelism, mask = ContextParallelism(group), Mask(window=window)
            batches = [drawn(*shape) for _ in range(ROUNDS)]
            first, again = [], []
            for ids in batches:
                first.append(milliseconds(ids, parallelism, mask))
                again.append(milliseconds(ids + 1, parallelism, mask))
            cells.append(f"{statistics.median(first):.2f}, {statistics.median(again):.2f}")
        rows, length, documents = shape
        print(f"| {rows} × {length:,}, {documents} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
