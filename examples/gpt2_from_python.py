"""GPT-2 in a training loop in Python on 2 × 2 ranks: two pipeline stages, each on two data-parallel ranks.

.venv/bin/python examples/gpt2_from_python.py                        starts four local ranks
.venv/bin/torchrun --nproc-per-node 4 examples/gpt2_from_python.py   joins torchrun's four

The text is the source of one module of Python's standard library; tokens are its bytes.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

import plait

CONTEXT, ROWS, STEPS = 64, 16, 60


def train() -> None:
    plan = plait.Plan(pp=2, dp=2, schedule="1f1b", microbatches=4)
    mesh = plait.Mesh(plan)
    model = plait.models.gpt2(layers=2, hidden=64, heads=4, vocab=256, context=CONTEXT)
    engine = plait.parallelize(model, plan, mesh, loss=plait.cross_entropy, seed=0)
    optimizer = torch.optim.AdamW(engine.parameter_groups(weight_decay=0.1), lr=3e-3)
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))

    def batch(step: int) -> tuple[Tensor, Tensor]:
        """Return this data-parallel rank's share of the global batch, which depends on the step only."""
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(text) - CONTEXT, (ROWS, 1), generator=generator)
        windows = text[starts + torch.arange(CONTEXT + 1)]
        share = windows.chunk(mesh.size("dp"))[mesh.index("dp")]
        return share[:, :-1], share[:, 1:]

    for step in range(STEPS):
        loss = engine.forward_backward(*batch(step))
        norm = engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if mesh.rank == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1}: loss {loss:.3f}, gradient norm {norm:.3f}")

    prompt = torch.tensor([list(b"def ")])
    sample = engine.generate(prompt, tokens=60, temperature=0.8, seed=0)
    if mesh.rank == 0:
        print(bytes(sample[0].tolist()).decode(errors="replace"))


plait.launch(train, ranks=4)
