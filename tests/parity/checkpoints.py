"""What runs in each rank where runs stop, and go on in another layout."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import plait
from plait.checkpoint.box_reader import BoxReader
from plait.checkpoint.folders import resolve
from plait.checkpoint.manifest import Manifest, read_manifest
from plait.engine import Engine
from plait.plan.layout import Layout
from plait.plan.plan import Plan

MICROBATCHES = 4
"""Of a step, over all data-parallel ranks together."""
VOCAB, CONTEXT, ROWS = 29, 6, 2
LAYOUTS: Mapping[str, Plan] = {
    "one": Plan(),
    "dp": Plan(dp=2),
    "full": Plan(dp=2, strategy="full"),
    "full-4": Plan(dp=4, strategy="full", reduce="each"),
    "hybrid": Plan(dp=4, replicate=2, strategy="full"),
    "tp": Plan(tp=2),
    "tp-3": Plan(tp=3, sequence_parallel="keep"),
    "pp": Plan(pp=2, schedule="zb-h1"),
    "zb-v": Plan(pp=2, schedule="zb-v"),
    "tp-gradients": Plan(tp=2, dp=2, strategy="gradients"),
    "pp-optimizer": Plan(pp=2, dp=2, strategy="optimizer", schedule="1f1b"),
    "all": Plan(pp=2, tp=2, dp=2, strategy="full", schedule="zb-v"),
    "cp": Plan(cp=2),
    "cp-4": Plan(cp=4, strategy="full", context_layout="striped"),
    "cp-hybrid": Plan(dp=2, cp=2, replicate=2, strategy="gradients"),
    "cp-all": Plan(pp=2, dp=2, cp=2, strategy="optimizer", context_parallel="ring"),
    "cp-tp": Plan(cp=2, tp=2, strategy="full", reduce="each", sequence_parallel="regather"),
}
"""Seventeen layouts, of 1 to 8 ranks."""


def plan_of(name: str) -> Plan:
    """In double precision, for the same global batch."""
    plan = LAYOUTS[name]
    return replace(plan, microbatches=MICROBATCHES // plan.dp, precision="fp64")


@dataclass
class Run:
    """A run on this rank."""

    engine: Engine
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)

    def train(self, steps: range) -> None:
        """Steps of the one run that all tests are parts of."""
        mesh, plan = self.engine.mesh, self.engine.plan
        mine = ROWS * plan.microbatches
        first = mesh.index("dp") * mine
        for step in steps:
            tokens = torch.randint(
                VOCAB, (ROWS * MICROBATCHES, CONTEXT + 1), generator=torch.Generator().manual_seed(step)
            )[first : first + mine]
            for group in self.optimizer.param_groups:
                group["lr"] = 1e-2 / (step + 1)
            self.losses.append(self.engine.forward_backward(tokens[:, :-1], tokens[:, 1:]).item())
            self.engine.step(self.optimizer, 0.5)
            self.optimizer.zero_grad()


def model() -> nn.Sequential:
    """That all of them train."""
    return plait.models.gpt2(layers=1, hidden=24, heads=6, vocab=VOCAB, context=CONTEXT)


Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""An optimizer of parameter groups."""


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-6, fused=True)


@contextmanager
def run_of(
    plan: Plan, *, seed: int = 3, dropout: float = 0.0, make: Make = adamw, timeout: float = 20.0
) -> Iterator[Run]:
    """A model and an optimizer on this rank."""
    mesh = plait.Mesh(plan, timeout=timeout)
    ours = model()
    if dropout:
        first, *rest = ours.named_children()
        ours = nn.Sequential(OrderedDict([first, ("drop", plait.Dropout(dropout)), *rest]))
    engine = plait.parallelize(ours, plan, mesh, loss=plait.cross_entropy, seed=seed)
    groups = engine.parameter_groups(weight_decay=0.1)
    yield Run(engine, make(groups))


def link(
    name: str, source: str | None, target: str, steps: tuple[int, int], saves_loaded: bool
) -> list[float]:
    """Load, train on, save; the losses. `saves_loaded`: what was loaded beside it, to be compared."""
    with run_of(plan_of(name), seed=3 if source is None else 4) as run:
        if source is not None:
            state = plait.load(run.engine, run.optimizer, source)
            assert state == {"step": steps[0]}
            if saves_loaded:
                plait.save(run.engine, run.optimizer, f"{target}-loaded", state)
        run.train(range(*steps))
        plait.save(run.engine, run.optimizer, target, {"step": steps[1]})
        run.engine.check_replicas(run.optimizer)
        return run.losses


def never_stopped(name: str, stop: str, end: str, steps: int) -> list[float]:
    """Save after `steps` steps, and after as many more; the losses of these."""
    with run_of(plan_of(name)) as run:
        run.train(range(steps))
        plait.save(run.engine, run.optimizer, stop, {"step": steps})
        run.train(range(steps, 2 * steps))
        plait.save(run.engine, run.optimizer, end, {"step": 2 * steps})
        return run.losses[steps:]


def tensors_of(path: Path) -> dict[str, Tensor]:
    """All global tensors of a checkpoint, whole."""
    folder = resolve(path)
    manifest = read_manifest(folder)
    return {name: _whole(folder, manifest, name) for name in manifest.tensors}


def _whole(folder: Path, manifest: Manifest, name: str) -> Tensor:
    known = manifest.tensors[name]
    whole = torch.empty(known.shape, dtype=getattr(torch, known.dtype))
    BoxReader(folder, manifest).fill(whole, name, Layout(known.shape, {"world": 1}), {"world": 0})
    return whole
