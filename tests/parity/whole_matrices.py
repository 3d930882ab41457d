"""Optimizers of whole matrices and parameters on one rank, in plain PyTorch, and on the ranks of a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from parity.case import Case
from parity.cases import gpt2, llama
from parity.pairs import covering_rows
from parity.reference import materialise
from parity.rows import plan_of
from parity.woven import shares, weave
from plait.engine import Engine
from plait.optimizers.part_owners import OwnedPart
from plait.plan.layout import Layout
from plait.plan.plan import Plan

STEPS = 6
BOUND = 1e-10
"""Of the difference after `STEPS` steps, relative to the largest change of the parameter."""
CLIP = 0.05
OTHERS = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
MUON = {"lr": 1e-2, "weight_decay": 0.1, "momentum": 0.9}


def orthogonalized_in_double(gradient: Tensor, coefficients: Any, steps: int, eps: float) -> Tensor:
    """What `torch.optim.Muon` calls, in float64 instead of bfloat16, also with a triple for each step."""
    triples = coefficients if isinstance(coefficients, list) else [coefficients] * steps
    tall = gradient.size(0) > gradient.size(1)
    x = (gradient.T if tall else gradient).clone()
    x /= x.norm().clamp(min=eps)
    for a, b, c in triples:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


FACTORS = {
    "case": ("gpt2", "llama", "odd"),
    "strategy": ("full", "none", "optimizer"),
    "model": ((1, 1), (2, 1), (1, 2), (2, 2)),
    "data": ((2, 1), (2, 2), (4, 2), (3, 1)),
    "cp": (1, 2),
}
"""`model`: pp and tp; `data`: dp and replicate."""
CASES = {
    "gpt2": gpt2(layers=2),  # tied
    "llama": llama(layers=2, tied=False),  # two heads of keys and values for four of queries
    "odd": gpt2(layers=3, hidden=18),
}


def allowed(row: dict[str, Any]) -> bool:
    """At most eight ranks."""
    return prod(row.get("model", ())) * row.get("data", (2, 1))[0] * row.get("cp", 1) <= 8


ROWS = covering_rows(FACTORS, allowed)


def plan_and_case(row: dict[str, Any]) -> tuple[Plan, Case]:
    """Of a row, in float64."""
    fields = {name: value for name, value in row.items() if name != "case"}
    return plan_of(fields), CASES[row["case"]]


Divide = Callable[[str, Tensor], Sequence[Tensor]]
"""Returns views of a parameter's values that are its matrices `[out, in]`; none: AdamW updates it."""


def whole_weights(name: str, values: Tensor) -> Sequence[Tensor]:
    """The weights of plait's linears in blocks: each is one matrix."""
    return [values] if values.dim() == 2 and name.startswith("blocks.") else []


class MuonOnOneRank:
    """The hidden matrices of a model by `torch.optim.Muon`, in float64, and the rest by `AdamW`."""

    def __init__(self, model: nn.Module, divide: Divide, options: Mapping[str, Any]) -> None:
        self._divide, rest = divide, []
        self._matrices: list[tuple[nn.Parameter, list[nn.Parameter]]] = []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                made = [nn.Parameter(one.clone()) for one in divide(name, parameter.detach())]
                self._matrices += [(name, parameter, made)] if made else []
                rest += [] if made else [parameter]
        matrices = [one for *_, made in self._matrices for one in made]
        self._muon = torch.optim.Muon(matrices or [nn.Parameter(torch.zeros(1, 1))], **options)
        vectors = {"params": [one for one in rest if one.dim() < 2], "weight_decay": 0.0}
        self._adamw = torch.optim.AdamW(
            [{"params": [one for one in rest if one.dim() >= 2]}, vectors], **OTHERS
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [*self._muon.param_groups, *self._adamw.param_groups]

    def step(self) -> None:
        for name, parameter, made in self._matrices:
            for matrix, gradient in zip(made, self._divide(name, parameter.grad), strict=True):
                matrix.grad = gradient.clone()
        with mock.patch("torch.optim._muon._zeropower_via_newtonschulz", orthogonalized_in_double):
            self._muon.step()
        for name, parameter, made in self._matrices:
            for matrix, values in zip(made, self._divide(name, parameter.detach()), strict=True):
                values.copy_(matrix.detach())
        self._adamw.step()


MakeOptimizer = Callable[[nn.Module], Any]


def train_on_one_rank(case: Case, make: MakeOptimizer, rows: int, steps: int = STEPS) -> dict[str, Tensor]:
    """Return the parameters of `case` after `steps` steps in plain PyTorch."""
    model = materialise(case.build(), torch.float64)
    optimizer = make(model)
    rates = [group["lr"] for group in optimizer.param_groups]
    for step, (inputs, targets) in enumerate(case.batches(rows, steps, torch.float64)):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate / (1 + step)
        model.zero_grad()
        case.mean(case.reference(model, inputs), targets).backward()
        nn.utils.clip_grad_norm_([one for one in model.parameters() if one.requires_grad], CLIP)
        optimizer.step()
    return {name: one.detach() for name, one in model.named_parameters()}


@dataclass(frozen=True)
class Trained:
    """What a rank has after its steps."""

    coordinate: dict[str, int]
    layouts: dict[str, Layout]
    parameters: dict[str, Tensor]
    traffic: list[dict[str, Any]]
    """Of each step of the optimizer: by axis and kind."""
    parts: Sequence[OwnedPart]
    """What ranks own."""


def train(case: Case, plan: Plan, make: Callable[[Engine], Any], steps: int = STEPS) -> Trained:
    """Train `case` on this rank of `plan` by the optimizer that `make` makes."""
    engine = weave(case, plan)
    optimizer, traffic = make(engine), []
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for batch in shares(case, engine, steps):
        optimizer.zero_grad()
        engine.forward_backward(*batch)
        engine.clip_grad_norm_(CLIP)
        before = engine.mesh.traffic.snapshot()
        optimizer.step()
        traffic.append(engine.mesh.traffic.since(before))
        scheduler.step()
    parameters = {name: one.detach().clone() for name, one in engine.named_parameters()}
    parts = optimizer.owned.parts
    return Trained(engine.mesh.coordinate, dict(engine.layouts), parameters, traffic, parts)
