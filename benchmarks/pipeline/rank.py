"""One rank of one contestant: takes a step for each line that it reads, and prints what it took, as JSON."""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import nullcontext
from typing import Any

import torch
from peers import PEERS, pipeline, plain
from timeline import result_of
from torch import distributed
from work import Step, batch
from woven import measured_cut, train, weave

from plait.engine import Engine


def say(**message: Any) -> None:
    """To whoever started this process."""
    print(json.dumps(message), flush=True)


def contestant(name: str, ranks: int) -> tuple[Step, Engine | None]:
    """What takes a step, and plait's engine if it is one.

    `name` is plain, torch-SCHEDULE or plait-SCHEDULE, with a cut like :10,8 behind it; else it is measured.
    """
    side, _, rest = name.partition("-")
    if side == "plain":
        return plain(), None
    schedule, _, choice = rest.partition(":")
    counts = tuple(map(int, choice.split(","))) if "," in choice else None
    if side == "torch":
        assert schedule in PEERS
        return pipeline(schedule, counts or measured_cut(PEERS[schedule].like, ranks)), None
    engine = weave(schedule, ranks, layers_per_stage=counts or measured_cut(schedule, ranks))
    return train(engine), engine


def main() -> None:
    """Build the contestant, and take a step for each line; at `watch`, record it and tell of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("contestant")
    parser.add_argument("rank", type=int)
    parser.add_argument("ranks", type=int)
    parser.add_argument("store", help="a file through which the ranks meet")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{arguments.store}",
        rank=arguments.rank,
        world_size=arguments.ranks,
    )
    step, engine = contestant(arguments.contestant, arguments.ranks)
    say(ready=True)
    for number, line in enumerate(sys.stdin):
        watched = engine if line.strip() == "watch" else None
        inputs, targets = batch(number)
        distributed.barrier()
        start, used = time.perf_counter(), time.process_time()
        with nullcontext() if watched is None else watched.recording() as recording:
            loss = step(inputs, targets)
        seconds, used = time.perf_counter() - start, time.process_time() - used
        seen = None if recording is None else result_of(recording)
        say(seconds=seconds, processor=used, loss=None if loss is None else float(loss), seen=seen)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
