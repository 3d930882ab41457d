"""The same training with plait, one thread a rank; prints the median seconds of a step and the first loss."""

import argparse
import statistics
import time

import torch
from model import BATCH, batch, config
from transformers import Qwen3MoeForCausalLM

import plait
from plait.models.huggingface import from_huggingface


def train(plan: plait.Plan, steps: int, dense: bool, forced_routing: bool) -> tuple[float, float]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = from_huggingface(Qwen3MoeForCausalLM(config(dense=dense)))
    if forced_routing:
        plait.tensor.balance_experts(model, forced_routing=True)
    engine = plait.parallelize(model, plan, plait.Mesh(plan), plait.cross_entropy)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    rows, index = BATCH // plan.dp, engine.mesh.index("dp")
    seconds, losses = [], []
    for step in range(steps):
        inputs, targets = batch(step, index * rows, (index + 1) * rows)
        start = time.perf_counter()
        losses.append(engine.forward_backward(inputs, targets))
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:]), losses[0].item()


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Add the fields of the plan, under their names."""
    for axis in ("pp", "dp", "cp", "tp", "ep", "etp", "microbatches"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    parser.add_argument("--strategy", default="none")
    parser.add_argument("--loss_rows", type=int)


def main() -> None:
    parser = argparse.ArgumentParser()
    add_plan_options(parser)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--dense", action="store_true", help="MLPs of the same active size")
    parser.add_argument("--forced_routing", action="store_true", help="all experts have the same load")
    options = vars(parser.parse_args())
    run = [options.pop(name) for name in ("steps", "dense", "forced_routing")]
    plan = plait.Plan(**options)
    print(*plait.launch(train, plan, *run, ranks=plan.world)[0])


if __name__ == "__main__":
    main()
