"""Runs of Muon and Owned stop, and go on in another layout as if they had not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import plait
from parity.case import rows_of
from parity.checkpoints import tensors_of
from parity.norm import assert_equal
from parity.test_muon import muon
from parity.test_owned import SETTINGS, owned_adafactor, owned_whitened
from parity.whole_matrices import BOUND, CASES, CLIP
from parity.woven import weave
from plait.checkpoint.dcp import export_dcp, import_dcp
from plait.engine import Engine
from plait.plan.plan import Plan

ROWS = 4
"""Of the global batch."""
STEPS, STOPS = 4, 2
CASE = CASES["gpt2"]
PLANS = {
    "one": Plan(),
    "full": Plan(dp=2, strategy="full"),
    "copies": Plan(dp=4, replicate=2, strategy="optimizer"),
    "tp": Plan(tp=2, cp=2),
    "pp": Plan(pp=2, dp=2, strategy="full"),
}


def plain_adafactor(engine: Engine) -> torch.optim.Optimizer:
    """For one rank, which has all parameters whole."""
    return torch.optim.Adafactor(engine.parameters(), **SETTINGS)


MAKE: dict[str, Any] = {
    "muon": muon,
    "adafactor": owned_adafactor,
    "plain": plain_adafactor,
    "lists": owned_whitened,
}


def train(name: str, kind: str, source: str | None, target: str, steps: tuple[int, int]) -> None:
    """Take steps of the run that all tests are parts of."""
    engine = weave(CASE, replace(PLANS[name], precision="fp64"))
    optimizer = MAKE[kind](engine)
    if source is not None:
        plait.load(engine, optimizer, source)
    share = ROWS // engine.plan.dp
    first = engine.mesh.index("dp") * share
    for inputs, targets in CASE.batches(ROWS, STEPS, torch.float64)[slice(*steps)]:
        optimizer.zero_grad()
        engine.forward_backward(*(rows_of(one, first, first + share) for one in (inputs, targets)))
        engine.clip_grad_norm_(CLIP)
        optimizer.step()
        engine.check_replicas(optimizer)
    plait.save(engine, optimizer, target)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("muon", ("full", "pp", "one")),
        ("adafactor", ("copies", "full", "one")),
        ("lists", ("tp", "copies", "pp")),
        ("muon", ("tp", "copies", "full")),
        ("adafactor", ("pp", "one", "tp")),
        ("lists", ("full", "pp", "one")),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_a_run_resumed_in_another_layout_continues_as_uninterrupted(
    thread_ranks: Any, tmp_path: Path, kind: str, names: tuple[str, str, str]
) -> None:
    before, after, undisturbed = names
    alone = "plain" if (kind, undisturbed) == ("adafactor", "one") else kind
    stop, end, never = (str(tmp_path / which) for which in ("stop", "end", "never"))
    thread_ranks.run(train, before, kind, None, stop, (0, STOPS), ranks=PLANS[before].world)
    exported, again = tmp_path / "exported", tmp_path / "again"
    export_dcp(Path(stop), exported)
    import_dcp(exported, again)
    went_on = "plain" if (kind, after) == ("adafactor", "one") else kind
    thread_ranks.run(train, after, went_on, str(again), end, (STOPS, STEPS), ranks=PLANS[after].world)
    thread_ranks.run(train, undisturbed, alone, None, never, (0, STEPS), ranks=PLANS[undisturbed].world)
    assert_equal(tensors_of(Path(end)), tensors_of(Path(never)), BOUND, "the saved value")
