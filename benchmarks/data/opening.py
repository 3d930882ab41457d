"""Prints how long training from a prepared corpus takes to begin, and the memory that it has then."""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path

import numpy as np
import torch

from plait.app.data.batches import Rows, ShuffledBatches, TokenWindows
from plait.app.data.document_rows import DocumentRows
from plait.app.data.token_shards import open_corpus

CONTEXT, BATCH = 2048, 16


def peak() -> float:
    """Return the largest resident size so far, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def main() -> None:
    torch.from_numpy(np.zeros(1)).clone()
    before, begin = peak(), time.perf_counter()
    corpus, index = open_corpus(Path(sys.argv[1]))
    opened = time.perf_counter()
    kind = DocumentRows if index.chats else TokenWindows
    rows: Rows = kind(corpus, CONTEXT, index.vocab, sys.argv[1])
    batches = ShuffledBatches(rows, BATCH, seed=0)
    batches.batch(0, slice(0, BATCH))
    first = time.perf_counter()
    for step in range(1, 99):
        batches.batch(step, slice(0, BATCH))
    before_hundredth = time.perf_counter()
    batches.batch(99, slice(0, BATCH))
    moments = opened - begin, first - opened, time.perf_counter() - before_hundredth
    print(*(f"{one * 1e3:,.1f}" for one in moments), f"{peak() - before:.0f}")


if __name__ == "__main__":
    main()
