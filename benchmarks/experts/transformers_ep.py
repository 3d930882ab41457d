"""The peer: training with transformers' own expert parallelism and FSDP, one thread a rank. Nothing of plait.

Prints the median seconds of a step, and the loss of the first. `--ranks 1` is one process without either.
"""

import argparse
import os
import statistics
import tempfile
import time

import torch
from model import BATCH, VOCAB, batch, config
from torch import distributed, multiprocessing, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig


def train(model: nn.Module, rank: int, ranks: int, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    rows = BATCH // ranks
    seconds, losses = [], []
    for step in range(steps):
        inputs, targets = batch(step, rank * rows, (rank + 1) * rows)
        start = time.perf_counter()
        logits = model(input_ids=inputs, use_cache=False).logits
        loss = functional.cross_entropy(logits.view(-1, VOCAB), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.detach())
    if rank == 0:
        print(statistics.median(seconds[2:]), losses[0].item())


def run_rank(rank: int, ranks: int, folder: str, port: int, arguments: argparse.Namespace) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)
    options = {}
    if ranks > 1:
        distributed.init_process_group("gloo")
        options["distributed_config"] = DistributedConfig(fsdp_size=ranks, ep_size=arguments.ep)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation=arguments.experts, **options
    )
    model.train()
    train(model, rank, ranks, arguments.steps)
    if ranks > 1:
        distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ep", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--experts", default="grouped_mm", help="experts_implementation")
    parser.add_argument("--port", type=int, default=29731)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(config()).save_pretrained(folder)
        given = (arguments.ranks, folder, arguments.port, arguments)
        multiprocessing.spawn(run_rank, given, nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
