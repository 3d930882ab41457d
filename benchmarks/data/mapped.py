"""`datasets.map` with a `tokenizer.json`: prints the seconds of `map`, and those of all processors."""

from __future__ import annotations

import os
import sys
import time
from functools import lru_cache
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each core

import datasets
from tokenizers import Tokenizer


@lru_cache(maxsize=1)
def opened(path: str) -> Tokenizer:
    return Tokenizer.from_file(path)


def encoded(rows: dict[str, list[str]], path: str) -> dict[str, Any]:
    found = opened(path).encode_batch_fast(rows["text"], add_special_tokens=False)
    return {"input_ids": [one.ids for one in found]}


def processors() -> float:
    """Seconds that processors have worked for this process and for those that it has started and awaited."""
    return sum(os.times()[:4])


def main() -> None:
    text, tokenizer, processes, cache = sys.argv[1:]
    datasets.disable_progress_bars()
    rows = datasets.load_dataset("json", data_files=text, split="train", cache_dir=cache)
    begin, worked = time.perf_counter(), processors()
    rows.map(
        encoded,
        batched=True,
        num_proc=int(processes),
        remove_columns=["text"],
        fn_kwargs={"path": tokenizer},
        features=datasets.Features({"input_ids": datasets.List(datasets.Value("uint16"))}),
    )
    print(time.perf_counter() - begin, processors() - worked)


if __name__ == "__main__":
    main()
