"""An optimizer with other parameters or groups than the saved one is refused before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from parity.checkpoints import plan_of, run_of
from plait.checkpoint.manifest import read_manifest
from plait.engine import Engine
from plait.errors import CheckpointError, PlanError
from plait.plan.plan import Plan
from plait.ranks.launch.rank_pool import RankPool

ONE = Plan()
NAMES = ("0.weight", "0.bias", "1.weight", "1.bias")
Group = tuple[Sequence[str], dict[str, Any]]


def engine_of(plan: Plan, value: float, *, frozen: Sequence[str] = ()) -> Engine:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4))
    for name, parameter in model.named_parameters():
        nn.init.constant_(parameter, value)
        parameter.requires_grad_(name not in frozen)
    return plait.parallelize(model, plan, plait.Mesh(plan), loss=plait.cross_entropy)


def adamw(engine: Engine, *groups: Group, lr: float = 0.1) -> torch.optim.Optimizer:
    """Of the parameters that this rank has of each group."""
    shards = dict(engine.named_parameters())
    return torch.optim.AdamW(
        [{"params": [shards[name] for name in names if name in shards], **of} for names, of in groups], lr=lr
    )


def saved(path: Path, *groups: Group, plan: Plan = ONE) -> None:
    """A checkpoint of one step."""
    engine = engine_of(plan, 0.5)
    optimizer = adamw(engine, *groups)
    engine.forward_backward(torch.ones(4, 3), torch.arange(4) % 4)
    optimizer.step()
    plait.save(engine, optimizer, path)


def refused(path: Path, *groups: Group, plan: Plan = ONE, frozen: Sequence[str] = ()) -> str:
    """Why an optimizer of these groups is refused; nothing was changed. "" where it is not."""
    engine = engine_of(plan, 0.25, frozen=frozen)
    optimizer = adamw(engine, *groups)
    try:
        plait.load(engine, optimizer, path)
    except CheckpointError as error:
        assert all((shard == 0.25).all() for shard in engine.parameters())
        assert not optimizer.state
        return str(error)
    return ""


ALL: Group = (NAMES, {})
MATRICES: Group = (NAMES[::2], {"weight_decay": 0.1})
VECTORS: Group = (NAMES[1::2], {"weight_decay": 0.0})


def test_the_state_of_one_parameter_group_is_not_divided_into_several(tmp_path: Path) -> None:
    saved(tmp_path, ALL)
    assert refused(tmp_path, MATRICES, VECTORS) == (
        "the optimizer has 0.weight and 0.bias in different groups (weight_decay 0.1 and 0.0), which were "
        "in one when the checkpoint was written: group parameters as then, or give both groups the same "
        "options."
    )
    assert refused(tmp_path, (NAMES[:1], {}), (NAMES[1:], {"lr": 0.5})).startswith(
        "the optimizer has 0.weight and 0.bias in different groups (lr 0.1 and 0.5), which were in one"
    )
    assert refused(tmp_path, (NAMES[:2], {}), (NAMES[2:], {})) == "", "nothing is lost"


def test_the_states_of_several_parameter_groups_are_not_merged(tmp_path: Path) -> None:
    saved(tmp_path, MATRICES, VECTORS)
    assert refused(tmp_path, ALL) == (
        "group 0 of the optimizer has 0.weight and 0.bias, which were in different groups when the "
        "checkpoint was written (weight_decay 0.1 and 0.0): group parameters as then."
    )
    assert refused(tmp_path, VECTORS, MATRICES) == ""


def test_parameter_groups_with_the_same_options_stay_apart(tmp_path: Path) -> None:
    saved(tmp_path, (NAMES[::2], {}), (NAMES[1::2], {}))
    assert len((read_manifest(tmp_path).optimizer or {})["groups"]) == 2
    assert refused(tmp_path, MATRICES, VECTORS) == "", "the same groups as then"
    assert refused(tmp_path, ALL) == "", "of the same options"


def test_an_optimizer_of_other_parameters_than_the_checkpoints_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "all", ALL)
    saved(tmp_path / "one", (NAMES[:1], {}))
    assert refused(tmp_path / "all", (NAMES[:1], {})) == (
        "the checkpoint's optimizer had 0.bias, 1.weight, 1.bias, and the optimizer has not: give one of the "
        "same parameters, or None for an optimizer that starts anew."
    )
    assert refused(tmp_path / "one", ALL) == (
        "the optimizer has 0.bias, 1.weight, 1.bias, and the checkpoint's had not: give one of the same "
        "parameters, or None for an optimizer that starts anew."
    )
    assert refused(tmp_path / "one", (NAMES[:1], {})) == ""
    assert refused(tmp_path / "all", (NAMES[:1], {}), frozen=NAMES[1:]) == "", "what is frozen needs no state"


def test_an_optimizer_with_a_parameter_outside_the_engine_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, ALL)
    engine = engine_of(Plan(), 0.25)
    optimizer = torch.optim.AdamW([*engine.parameters(), nn.Parameter(torch.ones(7))])
    with pytest.raises(
        CheckpointError, match=r"group 0 of the optimizer has a parameter \[7\] that is not the en"
    ):
        plait.load(engine, optimizer, tmp_path)


def on_ranks(thread_ranks: RankPool, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    return thread_ranks.run(function, *arguments, ranks=2)


STAGES = Plan(pp=2, layers_per_stage=(1, 1))


def divided_by_stage(path: Path) -> str:
    """One group saved on each of two stages; a group for each of them now."""
    saved(path, ALL, plan=STAGES)
    return refused(path, (NAMES[:2], {"lr": 0.5}), (NAMES[2:], {"lr": 0.25}), plan=STAGES)


def left_out_on_a_stage(path: Path) -> str:
    return refused(path, (NAMES[1:], {}), plan=STAGES)


def test_optimizer_differences_on_another_stage_are_reported_on_all_ranks(
    thread_ranks: RankPool, tmp_path: Path
) -> None:
    told = on_ranks(thread_ranks, divided_by_stage, tmp_path)
    assert told[0] == told[1]
    assert told[0].startswith("the optimizer has 0.weight and 1.weight in different groups (lr 0.5 and 0.25)")
    told = on_ranks(thread_ranks, left_out_on_a_stage, tmp_path)
    assert told[0] == told[1]
    assert told[0].startswith("the checkpoint's optimizer had 0.weight, and the optimizer has not")


class RowMeans(torch.optim.Optimizer):
    """Keeps a number for each row, and updates elements by themselves."""

    elementwise = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                means: Tensor = one.grad.reshape(len(one), -1).mean(1)
                self.state[one]["rows"] = torch.cat([means, means])


def kept_by_rows(path: Path) -> tuple[str, bool]:
    """A state that cannot be cut is met where parameters are."""
    engine = engine_of(Plan(dp=2), 0.5)
    optimizer = RowMeans(engine.parameters())
    engine.forward_backward(torch.ones(4, 3), torch.arange(4) % 4)
    optimizer.step()
    plait.save(engine, optimizer, path)
    engine = engine_of(Plan(dp=2, strategy="full"), 0.25)
    with pytest.raises(CheckpointError) as caught:
        plait.load(engine, RowMeans(engine.parameters()), path)
    return str(caught.value), all(bool((shard == 0.25).all()) for shard in engine.parameters())


def test_a_state_that_cannot_be_cut_is_refused_before_anything_is_read(
    thread_ranks: RankPool, tmp_path: Path
) -> None:
    (told, same), other = on_ranks(thread_ranks, kept_by_rows, tmp_path)
    assert (told, same) == other
    assert same
    assert told.startswith(
        "the optimizer kept rows of 0.bias as [4], which cannot be sharded as the parameter is"
    )


def with_lbfgs(path: Path) -> bool:
    with run_of(plan_of("pp")) as run:
        before = [shard.detach().clone() for shard in run.engine.parameters()]
        with pytest.raises(PlanError, match="LBFGS"):
            plait.load(run.engine, torch.optim.LBFGS(run.engine.parameters()), path)
        return all(torch.equal(a, b) for a, b in zip(before, run.engine.parameters(), strict=True))


def test_an_optimizer_that_cannot_work_here_is_refused(thread_ranks: RankPool, tmp_path: Path) -> None:
    assert on_ranks(thread_ranks, with_lbfgs, tmp_path) == [True, True]
