"""What else a run goes on with: other optimizers, their options, dropout's draws, the order of actions."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from parity.checkpoints import VOCAB, Make, plan_of, run_of, tensors_of
from parity.pairs import in_quick
from parity.test_checkpoints import check_close, check_same_bits
from plait.checkpoint.manifest import read_manifest
from plait.errors import CheckpointError
from plait.plan.plan import Plan
from plait.ranks.launch.rank_pool import RankPool

OPTIMIZERS: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": partial(torch.optim.RMSprop, momentum=0.5, centered=True),
    "asgd": torch.optim.ASGD,
}


def part(name: str, make: Make, source: str | None, target: str, steps: tuple[int, int]) -> None:
    with run_of(plan_of(name), make=make) as run:
        if source is not None:
            plait.load(run.engine, run.optimizer, source)
        run.train(range(*steps))
        plait.save(run.engine, run.optimizer, target)


@pytest.mark.parametrize("name", in_quick(OPTIMIZERS, "sgd", "nadam", "adagrad", "asgd"))
def test_each_optimizer_resumed_in_another_layout_continues_as_uninterrupted(
    thread_ranks: RankPool, tmp_path: Path, name: str
) -> None:
    make = partial(OPTIMIZERS[name], lr=1e-2)
    stop, end, never = (str(tmp_path / which) for which in ("stop", "end", "never"))
    thread_ranks.run(part, "full", make, None, stop, (0, 2), ranks=2)
    thread_ranks.run(part, "tp", make, stop, end, (2, 4), ranks=2)
    thread_ranks.run(part, "full", make, None, never, (0, 4), ranks=2)
    check_close(tensors_of(Path(end)), tensors_of(Path(never)), 1e-9)  # some divide noise by its size


class Shifted(nn.Module):
    """A linear with numbers of its own that no gradient reaches, not contiguous."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        nn.init.constant_(self.linear.weight, value)
        self.register_buffer("shift", torch.full((2, 4), value).t()[:, 0] * torch.arange(4).view(4))
        self.register_buffer("table", (torch.arange(6.0) * value).view(2, 3).t())

    def forward(self, value: Tensor) -> Tensor:
        return self.linear(value) + self.shift + self.table.sum()


class EveryKindOfState(torch.optim.Optimizer):
    """Keeps sums of another dtype than the parameters', rows where none is cut, numbers, and no tensors."""

    elementwise = True

    def __init__(self, params: Any, lr: float, *, rows: bool) -> None:
        super().__init__(params, {"lr": torch.tensor(lr), "betas": (0.9, 0.5)})
        self.rows = rows

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for one in (one for group in self.param_groups for one in group["params"]):
            kept = self.state[one]
            kept |= {"sum": one.grad.double() + 1, "own": one.grad + 2, "step": torch.tensor(3.0)}
            kept |= {"count": 4, "names": ["a", "b"], "scale": torch.tensor(0.25, dtype=torch.float64)}
            if self.rows:
                kept["rows"] = torch.arange(2 * len(one), dtype=torch.int32)


def every_kind(plan: Plan, source: str | None, target: str, *, rows: bool) -> list[str]:
    """Save what a step has left, or what is loaded where all is different; what the state is here."""
    value = 0.5 if source is None else 0.25
    torch.manual_seed(int(8 * value))
    model = nn.Sequential(nn.Linear(3, 4), Shifted(value), nn.Linear(4, 4, bias=False))
    engine = plait.parallelize(model, plan, plait.Mesh(plan, timeout=20.0), loss=plait.cross_entropy)
    optimizer = EveryKindOfState(engine.parameters(), value, rows=rows)
    if source is None:
        engine.forward_backward(torch.ones(8, 3), torch.arange(8) % 4)
        optimizer.step()
    else:
        plait.load(engine, optimizer, source)
    plait.save(engine, optimizer, target)
    (group,) = optimizer.param_groups
    assert (repr(group["lr"]), group["betas"]) == ("tensor(0.5000)", (0.9, 0.5))
    assert all(one["sum"].shape == shard.shape for shard, one in optimizer.state.items())
    kinds = {key: one for state in optimizer.state.values() for key, one in state.items()}
    return sorted(f"{key} {one.dtype if isinstance(one, Tensor) else one}" for key, one in kinds.items())


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("rows", [True, False])
def test_optimizer_state_of_every_kind_and_buffers_survive_a_change_of_layout(
    thread_ranks: RankPool, tmp_path: Path, rows: bool
) -> None:
    """State as it was, in its own dtype, and buffers, in the same layout and in others."""
    bf16 = partial(Plan, precision="bf16", master_precision="bf16")
    cut = bf16(pp=2, microbatches=2) if rows else bf16(dp=2, strategy="full")
    paths = [str(tmp_path / str(number)) for number in range(4)]
    kinds = []
    for number, plan in enumerate((bf16(), bf16(), cut, bf16(dp=2))):
        source = paths[number - 1] if number else None
        kinds += thread_ranks.run(
            partial(every_kind, rows=rows), plan, source, paths[number], ranks=plan.world
        )
    assert set(map(tuple, kinds)) == {
        (
            *("count 4", "names ['a', 'b']", "own torch.bfloat16"),
            *(["rows torch.int32"] if rows else []),
            *("scale torch.float64", "step torch.float32", "sum torch.float64"),
        )
    }
    first = tensors_of(Path(paths[0]))
    assert {"model.1.shift", "model.1.table", "optim.state.2.weight.sum"} <= first.keys()
    assert first["model.1.table"].tolist() == [[0.0, 1.5], [0.5, 2.0], [1.0, 2.5]]
    for path in paths[1:]:
        found = tensors_of(Path(path))
        assert {name: one.dtype for name, one in found.items()} == {
            name: one.dtype for name, one in first.items()
        }
        check_same_bits(found, first)
        assert read_manifest(Path(path)).optimizer == read_manifest(Path(paths[0])).optimizer


def in_bf16(path: str, master: Any, loads: bool) -> list[torch.dtype]:
    """Save a run of one step or go on with it; return the dtypes of parameters and moments."""
    plan = Plan(dp=2, strategy="optimizer", precision="bf16", master_precision=master)
    with run_of(plan) as run:
        if loads:
            plait.load(run.engine, run.optimizer, path)
        run.train(range(int(loads), 1 + loads))
        if not loads:
            plait.save(run.engine, run.optimizer, path)
        moments = [state["exp_avg"].dtype for state in run.optimizer.state.values()]
        return sorted({*moments, *(one.dtype for one in run.engine.parameters())}, key=str)


def test_a_checkpoint_of_bf16_masters_goes_on_in_fp32_and_says_so(
    thread_ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "stop")
    assert thread_ranks.run(in_bf16, path, "bf16", False, ranks=2)[0] == [torch.bfloat16]
    assert thread_ranks.run(in_bf16, path, "bf16", True, ranks=2)[0] == [torch.bfloat16]
    assert capsys.readouterr().out == ""
    assert thread_ranks.run(in_bf16, path, None, True, ranks=2)[0] == [torch.float32]
    told = capsys.readouterr().out
    assert told.count("updated in bfloat16, and the optimizer goes on in float32: ") == 1  # of rank 0


def grouped_by_stage(plan: Plan, path: str, *, loads: bool) -> list[float]:
    """Each stage has a group for each of its parameters, with a rate of its own."""
    with run_of(plan) as run:
        rates = {name: float(number) for number, name in enumerate(run.engine.layouts)}
        groups = [{"params": [p], "lr": rates[name]} for name, p in run.engine.named_parameters()]
        expected = [group["lr"] for group in groups]
        if loads:
            groups = [{**group, "lr": 0.5} for group in groups]
        optimizer = torch.optim.SGD(groups)
        if loads:
            plait.load(run.engine, optimizer, path)
            assert [group["lr"] for group in optimizer.param_groups] == expected
        else:
            plait.save(run.engine, optimizer, path)
        return expected


def test_parameter_groups_built_by_each_stage_are_saved_and_loaded(
    thread_ranks: RankPool, tmp_path: Path
) -> None:
    plan = Plan(pp=2, microbatches=4)
    for loads in (False, True):
        thread_ranks.run(
            lambda loads: grouped_by_stage(plan, str(tmp_path / "one"), loads=loads), loads, ranks=2
        )


def with_dropout(plan: Plan, source: str | None, target: str, steps: tuple[int, int]) -> list[float]:
    with run_of(plan, dropout=0.25) as run:
        if source is not None:
            plait.load(run.engine, run.optimizer, source)
        run.train(range(*steps))
        plait.save(run.engine, run.optimizer, target)
        return run.losses


def test_a_resumed_run_draws_the_dropout_masks_of_an_uninterrupted_one(
    thread_ranks: RankPool, tmp_path: Path
) -> None:
    plan = Plan(pp=2, microbatches=4, precision="fp64")
    stop, end, never = (str(tmp_path / which) for which in ("stop", "end", "never"))
    thread_ranks.run(with_dropout, plan, None, stop, (0, 2), ranks=2)
    losses = thread_ranks.run(with_dropout, plan, stop, end, (2, 4), ranks=2)[0]
    assert losses == thread_ranks.run(with_dropout, plan, None, never, (0, 4), ranks=2)[0][2:]
    check_same_bits(tensors_of(Path(end)), tensors_of(Path(never)))


def followed(plan: Plan, path: str, *, loads: bool) -> str:
    with run_of(plan) as run:
        if loads:
            plait.load(run.engine, run.optimizer, path)
        else:
            costs = plait.Costs(F=[1.0, 3.0], I=[1.0, 2.0], W=[1.0, 2.0])
            run.engine.reorder(costs)
            plait.save(run.engine, run.optimizer, path)
        return str(run.engine.schedule.order)


def test_the_order_of_actions_is_kept_where_the_plan_wishes_it(
    thread_ranks: RankPool, tmp_path: Path
) -> None:
    path = str(tmp_path / "one")
    plan, other = (Plan(pp=2, microbatches=4, schedule=name) for name in ("1f1b", "gpipe"))
    searched = thread_ranks.run(lambda: followed(plan, path, loads=False), ranks=2)[0]
    assert thread_ranks.run(lambda: followed(plan, path, loads=True), ranks=2)[0] == searched
    assert thread_ranks.run(lambda: followed(other, path, loads=True), ranks=2)[0] != searched


def test_a_save_in_the_background_holds_the_state_at_the_call(tmp_path: Path) -> None:
    with run_of(Plan()) as run:
        state = {"step": 1}
        writing = plait.save(run.engine, run.optimizer, tmp_path / "one", state, wait=False)
        state["step"] = 2
        writing.wait()
        assert read_manifest(tmp_path / "one").state == {"step": 1}
        with pytest.raises(CheckpointError, match="has a key 30, which JSON would turn into text"):
            plait.save(run.engine, run.optimizer, tmp_path / "two", {"milestones": {30: 1}})
        with pytest.raises(CheckpointError, match="not what JSON can hold"):
            plait.save(run.engine, run.optimizer, tmp_path / "two", {"model": torch.zeros(VOCAB)})
        assert not (tmp_path / "two").exists()
