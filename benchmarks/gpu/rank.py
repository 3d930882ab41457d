"""One rank of one contestant: does what the lines on its standard input say, and answers each, as JSON.

{"seconds": ..., "loss": ...}        to "steps 3": of one of them, on this rank; the loss of the last
{"measured": ..., "pp": ...}         to "memory": the most bytes of tensors in a step's forward and backward
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from peak import Peak
from peers import PEERS
from torch import distributed
from work import Trainee, Work, shares
from woven import predicted, woven

import plait
from plait.ranks.accelerator import CPU, current_accelerator, synchronize

Answer = dict[str, Any]


def answers(
    contestant: dict[str, Any], work: Work, kind: str, timeout: float, orders: Iterable[str]
) -> Iterator[Answer]:
    """Build the contestant in the world that is joined, and carry out the orders: one answer to each.

    The first answer says that it is ready. `contestant` has the name of a `peer`, or the fields of a `plan`.
    """
    ranks, device = distributed.get_world_size(), current_accelerator() if kind == "cuda" else CPU
    place: Answer = {}
    if "peer" in contestant:
        trainee = PEERS[contestant["peer"]](work, ranks, device)
    else:
        trainee, mesh = woven(work, ranks, contestant["plan"], device, timeout)
        place = {"pp": mesh.index("pp")}
    batches = shares(work, ranks, trainee.index, trainee.count)
    yield {"ready": True}
    for order in orders:
        word, _, count = order.strip().partition(" ")
        if word == "steps":
            yield steps(trainee, list(islice(batches, int(count))), device)
        else:
            answer = {"measured": memory(trainee, batches, device), **place}
            if "plan" in contestant and distributed.get_rank() == 0:
                answer["predicted"] = predicted(work, ranks, contestant["plan"], device)
            yield answer


def steps(trainee: Trainee, batches: list[Any], device: torch.device) -> Answer:
    """Take a step on each batch, and return seconds and loss. A barrier starts all ranks together."""
    synchronize(device)
    distributed.all_reduce(torch.zeros(1))  # on the CPU: a barrier without the GPU
    start = time.perf_counter()
    for batch in batches:
        loss = trainee.step(*batch)
    synchronize(device)
    return {"seconds": (time.perf_counter() - start) / len(batches), "loss": float(loss)}


def memory(trainee: Trainee, batches: Iterator[Any], device: torch.device) -> int:
    """Return the peak of a forward and backward in bytes, in a second step, with gradients cleared."""
    peak = Peak(device)
    trainee.forward_backward(*next(batches))
    trainee.update()
    peak.include(trainee.state())
    trainee.optimizer.zero_grad()
    with peak:
        trainee.forward_backward(*next(batches))
    trainee.update()
    trainee.optimizer.zero_grad()
    return peak.most


def main() -> None:
    """Join the world that the environment describes, and answer on the given pipe."""
    parser = argparse.ArgumentParser()
    parser.add_argument("contestant", type=json.loads)
    parser.add_argument("work", type=json.loads)
    parser.add_argument("--device", required=True)
    parser.add_argument("--timeout", type=float, required=True, help="seconds that a rank waits for another")
    parser.add_argument("--ranks-per-gpu", type=int, default=1)
    parser.add_argument("--answers", type=int, required=True, help="file descriptor of the pipe")
    given = parser.parse_args()
    pipe = os.fdopen(given.answers, "w")
    faulthandler.register(signal.SIGUSR2)

    def serve() -> None:
        work = Work(**given.work)
        for answer in answers(given.contestant, work, given.device, given.timeout, sys.stdin):
            print(json.dumps(answer), file=pipe, flush=True)

    try:
        shared = given.ranks_per_gpu
        plait.launch(serve, device=given.device, timeout=given.timeout, ranks_per_gpu=shared)
    except Exception as error:
        said = {"error": str(error).strip() or "no message", "kind": type(error).__name__}
        print(json.dumps(said), file=pipe, flush=True)
        raise


if __name__ == "__main__":
    main()
