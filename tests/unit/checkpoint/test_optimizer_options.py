"""Which options a loaded optimizer has: the saved ones, or its own; and several optimizers together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import plait
from plait.checkpoint.manifest import FILE, manifest_text, read_manifest
from plait.checkpoint.optimizer_state import layout_of_state
from plait.engine import Engine
from plait.errors import CheckpointError
from plait.plan.layout.layout import Layout
from plait.plan.plan import Plan
from plait.ranks.launch.rank_pool import RankPool

SGD, ADAM = torch.optim.SGD, torch.optim.Adam
Make = Callable[..., torch.optim.Optimizer]


def engine_of(plan: Plan = Plan()) -> Engine:  # noqa: B008 (frozen)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    return plait.parallelize(model, plan, plait.Mesh(plan), loss=nn.CrossEntropyLoss())


def step(engine: Engine, *optimizers: torch.optim.Optimizer) -> None:
    engine.forward_backward(torch.eye(4, 3, dtype=torch.float64), torch.arange(4))
    for one in optimizers:
        one.step()
        one.zero_grad()


def saved(path: Path, make: Make, schedule: Callable[[Any], Any] | None = None) -> None:
    engine = engine_of()
    optimizer = make(engine.parameters())
    scheduler = None if schedule is None else schedule(optimizer)
    step(engine, optimizer)
    if scheduler is not None:
        scheduler.step()
    plait.save(engine, optimizer, path)


def loaded(path: Path, make: Make, options: Any, *, scheduled: bool = False) -> dict[str, Any]:
    engine = engine_of()
    optimizer = make(engine.parameters())
    if scheduled:
        lr_scheduler.StepLR(optimizer, 1, 0.5)
    plait.load(engine, optimizer, path, options=options)
    step(engine, optimizer)
    return optimizer.param_groups[0]


def test_options_are_those_saved_or_those_given_and_the_difference_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path, partial(SGD, lr=0.1, momentum=0.9))
    other = partial(SGD, lr=0.2, momentum=0.5)
    group = loaded(tmp_path, other, "saved")
    assert (group["lr"], group["momentum"]) == (0.1, 0.9)
    assert capsys.readouterr().out == (
        "The optimizer's settings are those of the checkpoint: lr 0.1 in place of 0.2, momentum 0.9 in place "
        "of 0.5.\n"
    )
    group = loaded(tmp_path, other, "given")
    assert (group["lr"], group["momentum"]) == (0.2, 0.5)
    assert capsys.readouterr().out == (
        "The optimizer's settings are those given, not those of the checkpoint: lr 0.2 in place of 0.1, "
        "momentum 0.5 in place of 0.9.\n"
    )
    loaded(tmp_path, partial(SGD, lr=0.1, momentum=0.9, foreach=True), "given")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("options", ["saved", "given"])
def test_a_schedulers_learning_rate_is_restored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str
) -> None:
    """Where the optimizer begins with the same one; with another rate, that one counts if it is to."""
    saved(tmp_path, partial(SGD, lr=0.1), lambda optimizer: lr_scheduler.StepLR(optimizer, 1, 0.5))
    for scheduled in (False, True):
        assert loaded(tmp_path, partial(SGD, lr=0.1), options, scheduled=scheduled)["lr"] == 0.05
    assert capsys.readouterr().out == ""
    assert loaded(tmp_path, partial(SGD, lr=0.3), options)["lr"] == (0.05 if options == "saved" else 0.3)
    assert "lr 0.05 in place of 0.3" in capsys.readouterr().out or options == "given"


def test_a_cycled_momentum_goes_on_with_its_scheduler(tmp_path: Path) -> None:
    cycle = partial(lr_scheduler.OneCycleLR, max_lr=1.0, total_steps=10)
    saved(tmp_path, partial(SGD, lr=0.1, momentum=0.9), cycle)
    group = loaded(tmp_path, partial(SGD, lr=0.04, momentum=0.9), "given")
    assert (group["lr"] > 0.04, group["momentum"] < 0.95, group["max_momentum"]) == (True, True, 0.95)


def test_loading_with_given_options_accepts_other_parameter_groups(tmp_path: Path) -> None:
    saved(tmp_path, partial(SGD, lr=0.1, momentum=0.9))

    def divided(parameters: Any) -> torch.optim.Optimizer:
        first, *rest = parameters
        return SGD([{"params": [first], "lr": 0.2}, {"params": rest}], lr=0.3, momentum=0.9)

    with pytest.raises(CheckpointError, match="in different groups"):
        loaded(tmp_path, divided, "saved")
    assert loaded(tmp_path, divided, "given")["lr"] == 0.2


def test_options_whose_state_is_missing_are_refused(tmp_path: Path) -> None:
    saved(tmp_path / "adam", partial(ADAM, lr=0.1))
    with pytest.raises(
        CheckpointError, match=r"keeps max_exp_avg_sq for each parameter .* not hold for 0\.weight"
    ):
        loaded(tmp_path / "adam", partial(ADAM, lr=0.1, amsgrad=True), "given")
    saved(tmp_path / "plain", partial(torch.optim.RMSprop, lr=0.1))
    with pytest.raises(CheckpointError, match="keeps momentum_buffer for each parameter"):
        loaded(tmp_path / "plain", partial(torch.optim.RMSprop, lr=0.1, momentum=0.5), "given")
    saved(tmp_path / "sgd", partial(SGD, lr=0.1))
    assert loaded(tmp_path / "sgd", partial(SGD, lr=0.1, momentum=0.5), "given")["momentum"] == 0.5
    saved(tmp_path / "amsgrad", partial(ADAM, lr=0.1, amsgrad=True))
    assert not loaded(tmp_path / "amsgrad", partial(ADAM, lr=0.1), "given")["amsgrad"]


def of_two(engine: Engine, *, swapped: bool = False) -> list[torch.optim.Optimizer]:
    """Adam for matrices, and SGD for vectors."""
    matrices = [one for name, one in engine.named_parameters() if "weight" in name]
    vectors = [one for name, one in engine.named_parameters() if "bias" in name]
    if swapped:
        matrices, vectors = vectors, matrices
    return [ADAM(matrices, lr=0.1), SGD(vectors, lr=0.2, momentum=0.5)]


def trained(plan: Plan, source: Path | None, target: Path, steps: int) -> dict[str, torch.Tensor]:
    engine = engine_of(plan)
    both = of_two(engine)
    if source is not None:
        assert plait.load(engine, both, source) == {"step": 2}
    for _ in range(steps):
        step(engine, *both)
    plait.save(engine, both, target, {"step": 2})
    return engine.state_dict(everywhere=True)


def test_several_optimizers_go_on_under_another_plan(thread_ranks: RankPool, tmp_path: Path) -> None:
    stages = Plan(pp=2, microbatches=2, precision="fp64")
    thread_ranks.run(trained, stages, None, tmp_path / "two", 2, ranks=2)
    shards = Plan(dp=2, strategy="full", precision="fp64")
    found = thread_ranks.run(trained, shards, tmp_path / "two", tmp_path / "four", 2, ranks=2)[1]
    wanted = trained(Plan(precision="fp64"), None, tmp_path / "never", 4)
    assert all(torch.allclose(found[name], wanted[name], rtol=1e-12, atol=1e-14) for name in wanted)


def test_several_optimizers_that_are_not_those_saved_are_refused(tmp_path: Path) -> None:
    trained(Plan(precision="fp64"), None, tmp_path / "two", 1)
    engine = engine_of(Plan(precision="fp64"))
    first, second = of_two(engine)
    overlapping = [first, SGD(engine.parameters(), lr=0.1)]
    for given, message in (
        (
            first,
            r"the state of Adam \+ SGD, and the optimizer is Adam: give one of the same class, several in a",
        ),
        ([second, first], r"holds the state of Adam \+ SGD, and the optimizer is SGD \+ Adam"),
        (of_two(engine, swapped=True), "holds 0.weight as a parameter of Adam, and SGD has it now"),
        (overlapping, "two of the optimizers have 0.weight in common|two of the optimizers have 2.weight"),
        ([], "the list of optimizers is empty"),
        ([first, SGD], "the optimizer is the class SGD"),
    ):
        with pytest.raises(CheckpointError, match=message):
            plait.load(engine, given, tmp_path / "two")
    for wrong in (overlapping, [], [first, 3]):
        with pytest.raises(CheckpointError, match=r"was not written .*(in common|is empty|an object of int)"):
            plait.save(engine, wrong, tmp_path / "none")  # type: ignore[arg-type]
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [("lr", "0.1"), ("lr", True), ("lr", 1e301), ("betas", [0.9]), ("betas", 0.9), ("eps", {})],
)
def test_an_option_of_another_type_is_refused_before_anything_changes(
    tmp_path: Path, key: str, value: object
) -> None:
    saved(tmp_path / "a", partial(ADAM, lr=0.5))
    manifest = read_manifest(tmp_path / "a")
    assert manifest.optimizer is not None
    manifest.optimizer["groups"][0][key] = value
    (tmp_path / "a" / FILE).write_text(manifest_text(manifest))
    with pytest.raises(CheckpointError, match=f"the checkpoint has {key} = .* for group 0 of the optimizer"):
        loaded(tmp_path / "a", ADAM, "saved")
    assert loaded(tmp_path / "a", ADAM, "given")["lr"] == 1e-3


def test_state_of_its_parameters_shape_is_sharded_as_it_and_numbers_are_not() -> None:
    for key, shape, parameter, alike in [
        ("step", (), (3, 2), False),
        ("anything", (), (3, 2), False),
        ("exp_avg", (3, 2), (3, 2), True),
        ("step", (), (), False),
        ("exp_avg", (), (), True),
        ("row_var", (3, 1), (3, 2), False),
    ]:
        layout = Layout(parameter, {"tp": 2})
        found = layout_of_state(key, shape, layout)
        assert (found is layout) is alike, (key, shape, parameter)
        assert alike or found == Layout(shape, {"tp": 2})
