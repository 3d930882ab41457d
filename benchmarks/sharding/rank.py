"""One rank of one contestant: takes a step for each line that it reads, and prints what it took, as JSON."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peers import ddp, fsdp2
from torch import distributed
from work import RANKS, Step, batch
from woven import weave

POLICIES: dict[str, dict[str, Any]] = {
    "fsdp2-last": {},
    "fsdp2-each": {"each": True},
    "fsdp2-whole-for-a-microbatch": {"whole": "micro-batch"},
    "fsdp2-whole-for-a-step": {"whole": "step"},
}
PEERS: dict[str, Callable[[], Step]] = {"ddp": ddp}
for name, policy in POLICIES.items():
    PEERS[name] = partial(fsdp2, **policy)
    for units in ("inner", "blocks"):
        PEERS[f"{name}-by-{units}"] = partial(fsdp2, **policy, units=units)


def resident() -> int:
    """Bytes of this process that were in memory, at the most so far. Shared memory counts on every rank."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) * 1024


def say(**message: Any) -> None:
    """To whoever started this process."""
    print(json.dumps(message), flush=True)


def main() -> None:
    """Build the contestant, take steps as long as there are lines, and tell what they needed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("contestant", help="one of PEERS, or plait-STRATEGY-REDUCE")
    parser.add_argument("rank", type=int)
    parser.add_argument("store", help="a file through which the ranks meet")
    arguments = parser.parse_args()
    rank = arguments.rank
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{arguments.store}", rank=rank, world_size=RANKS
    )
    traffic = None
    before = resident()
    if arguments.contestant in PEERS:
        step = PEERS[arguments.contestant]()
    else:
        _, strategy, reduce = arguments.contestant.split("-")
        step, traffic = weave(strategy, reduce)
    say(before=before)
    for number, _ in enumerate(sys.stdin):
        inputs, targets = batch(number, rank)
        distributed.barrier()
        start, used = time.perf_counter(), time.process_time()
        loss = step(inputs, targets)
        say(seconds=time.perf_counter() - start, processor=time.process_time() - used, loss=float(loss))
    moved: Counter[str] = Counter()
    for kinds in () if traffic is None else traffic().values():
        moved.update({kind: count.bytes for kind, count in kinds.items()})
    say(peak=resident(), moved=moved)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
