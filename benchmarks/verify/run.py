"""How long does a verification take, and how small a mistake does it see? Prints the tables of README.md."""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import plait
from plait.engine.pipeline.stage_exchange import Exchange
from plait.ranks.launch.rank_pool import RankPool
from plait.tensor.losses import cross_entropy
from plait.verification.case import Case
from plait.verification.options import Mode, VerifyOptions
from plait.verification.rank_verification import RankOutcome, verify_rank
from plait.verification.verify import build_report

DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"
RUNS = {
    "demo, float64": [],
    "demo, native (fp32)": ["--mode", "native"],
    "demo, exact": ["--mode", "exact"],
    "demo, dp 2: eight ranks": ["--parallel.dp", "2"],
    "demo, all plans on 4 ranks": ["--all"],
    "2 blocks, all plans on 4 ranks": ["--all", "--model.layers", "2"],
}
PLAN = plait.Plan(pp=2, microbatches=2)


def timed(options: list[str]) -> str:
    """A row of the first table: the whole command, and what it says."""
    command = [sys.executable, "-m", "plait", "verify", "--config", str(DEMO), "--json", *options]
    begun = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    seconds = time.perf_counter() - begun
    found = json.loads(done.stdout)
    reports = found.get("plans", [found])
    compared = sum(report["compared"] for report in reports)
    used = max(report["used"] for report in reports)
    answer = "equal" if found["equal"] else "different"
    return f"{seconds:.0f} | {len(reports)} | {compared:,} | {used:.0%} | {answer} |"


@contextmanager
def one_element_off(error: float, backward: bool) -> Iterator[None]:
    """The element in the middle of the first message is off by `error` of the message's largest."""
    original = Exchange.send

    def send(self: Exchange, action: Any, tensors: list[Tensor], peer: int) -> None:
        if (action.kind.value != "F") is backward and action.microbatch == 0:
            tensors = [tensor.clone() for tensor in tensors]
            flat = tensors[0].view(-1)
            flat[len(flat) // 2] += error * flat.abs().max()
        original(self, action, tensors, peer)

    with patch.object(Exchange, "send", send):
        yield


def run_with(error: float, backward: bool, case: Case) -> RankOutcome:
    """One rank's verification with a mistake in it."""
    with one_element_off(error, backward):
        return verify_rank(case, PLAN)


def smallest_seen(pool: RankPool, mode: Mode, backward: bool, hidden: int) -> str:
    """The smallest power of ten that is seen."""
    tokens = torch.randint(256, (4, 65), generator=torch.Generator().manual_seed(0))
    model = partial(plait.models.gpt2, layers=2, hidden=hidden, heads=4, vocab=256, context=64)
    options = VerifyOptions(mode=mode, steps=1)
    case = Case(model, cross_entropy, [(tokens[:, :-1], tokens[:, 1:].contiguous())], options)
    seen = "none"
    for exponent in range(0, -17, -1):
        outcomes = pool.run(run_with, 10.0**exponent, backward, case, ranks=2)
        if build_report(outcomes, PLAN, case.options):
            break
        seen = f"1e{exponent}"
    return seen


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 256])
    options = parser.parse_args()
    print("| run | seconds | plans | tensors compared | of what rounding explains | answer |")
    print("|---|---|---|---|---|---|")
    for name, arguments in RUNS.items():
        print(f"| {name} | {timed(arguments)}", flush=True)
    print("\n| mode | hidden | forward message | gradient message |\n|---|---|---|---|")
    torch.set_num_threads(1)
    with RankPool(2, threads=1, device="cpu") as pool:
        for mode in ("float64", "native"):
            for hidden in options.hidden:
                row = [smallest_seen(pool, mode, backward, hidden) for backward in (False, True)]
                print(f"| {mode} | {hidden} | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
