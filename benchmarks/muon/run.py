"""How long does the step of `plait.Muon` take where two ranks share its work? Prints the table of README.md.

Beside it `torch.optim.Muon` (and AdamW for the rest) on whole parameters: every rank orthogonalizes all
matrices, as under DistributedDataParallel. Both take turns (A B B A …) on the same two ranks, so that a
change in the machine's speed meets both; a ratio is taken inside a round, and the median over rounds counts.
"""

import argparse
import statistics
import time

import torch

import plait
from plait.ranks.collectives import barrier
from plait.ranks.group import Group

SIZES = {"layers": 4, "hidden": 512, "heads": 8, "vocab": 512, "context": 64}
WHOLE = plait.Plan(dp=2)
PLANS = {"strategy none": WHOLE, "strategy full": plait.Plan(dp=2, strategy="full")}


def with_gradients(plan: plait.Plan) -> plait.engine.engine.Engine:
    """Return an engine of the model whose parameters have gradients."""
    model = plait.models.gpt2(**SIZES)
    engine = plait.parallelize(model, plan, plait.Mesh(plan), loss=plait.cross_entropy)
    tokens = torch.randint(0, SIZES["vocab"], (2, SIZES["context"]))
    engine.forward_backward(tokens, tokens)
    return engine


def of_torch(engine: plait.engine.engine.Engine, matrices: set[str]) -> list[torch.optim.Optimizer]:
    """Return torch's Muon of the hidden matrices, and AdamW of all other parameters."""
    parameters = dict(engine.named_parameters())
    hidden = [one for name, one in parameters.items() if name in matrices]
    others = [one for name, one in parameters.items() if name not in matrices]
    return [torch.optim.Muon(hidden), torch.optim.AdamW(others, fused=True)]


def seconds(optimizers: list[torch.optim.Optimizer], group: Group) -> float:
    """Return the seconds of a step, from when both ranks are ready to when both are done."""
    barrier(group).wait()
    begun = time.perf_counter()
    for one in optimizers:
        one.step()
    barrier(group).wait()
    return time.perf_counter() - begun


def measured(plan: plait.Plan, rounds: int) -> tuple[list[float], list[float], list[int], int]:
    """Return the seconds of both steps in each round, the ranks' loads, and bytes that this rank sends."""
    engine = with_gradients(plan)
    muon, group, traffic = plait.Muon(engine), engine.mesh.group("world"), engine.mesh.traffic
    matrices = {name for name, one in muon.matrices.items() if one.parts}
    steps = {"shared": [muon], "torch": of_torch(with_gradients(WHOLE), matrices)}
    found: dict[str, list[float]] = {name: [] for name in steps}
    sent = 0
    for number in range(rounds + 1):
        for name in steps if number % 2 else reversed(steps):
            before = traffic.snapshot()
            taken = seconds(steps[name], group)
            counts = traffic.since(before)
            if name == "shared":
                sent = sum(kinds["all_to_all"].bytes for kinds in counts.values() if "all_to_all" in kinds)
            if number:
                found[name].append(taken)
    return found["shared"], found["torch"], muon.owned.loads(plan.world), sent


def main() -> None:
    """Run the plans and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    print(
        "| two ranks, dp = 2 | plait.Muon, ms | torch.optim.Muon, ms | ratio | each round | load | MB sent |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, plan in PLANS.items():
        results = plait.launch(measured, plan, arguments.rounds, ranks=2, threads=1)
        shared, alone, loads, _ = results[0]
        ratios = [one / other for one, other in zip(shared, alone, strict=True)]
        each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        sent = sum(result[3] for result in results) / 1e6
        print(
            f"| {name} | {1e3 * statistics.median(shared):.0f} | {1e3 * statistics.median(alone):.0f} | "
            f"{statistics.median(ratios):.2f} | {each} | {max(loads) * 2 / sum(loads):.3f} | {sent:.2f} |"
        )


if __name__ == "__main__":
    main()
