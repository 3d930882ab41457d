"""`plait.fit` trains as a plain loop of PyTorch does, under any plan, also where it stops and goes on."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import plait
from plait.errors import ConfigError, DataError, NonFiniteError
from plait.loop import Callback, Checkpoints, History, JsonLines, Log, Progress, ReplicaChecks, TrainingLoop
from plait.plan.plan import Plan
from plait.ranks.launch.rank_pool import RankPool

STEPS, CLIP = 8, 0.5
PLANS = {
    "one": Plan(precision="fp64"),
    "pp": Plan(pp=2, microbatches=2, schedule="zb-h1", precision="fp64"),
    "dp": Plan(dp=2, strategy="full", precision="fp64"),
}


def dataset() -> TensorDataset:
    inputs = torch.randn(22, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


def model() -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in layers.parameters():
        parameter.data = torch.randn(parameter.shape, dtype=torch.float64, generator=generator) / 3
    return layers


def rate(step: int) -> float:
    return 0.1 / (step + 1)


def plain() -> tuple[list[tuple[float, float]], list[list[Tensor]], dict[str, Tensor], float]:
    """Losses, norms, all gradients, parameters and validation loss of a loop of PyTorch alone."""
    loader, layers, data = plait.Loader(dataset(), batch=8, seed=5), model(), dataset()
    matrices = [one for one in layers.parameters() if one.dim() > 1]
    vectors = [one for one in layers.parameters() if one.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups)
    numbers, gradients = [], []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        chosen = loader.order(step)
        inputs, targets = (part[chosen] for part in data.tensors)
        optimizer.zero_grad()
        loss = functional.cross_entropy(layers(inputs), targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(layers.parameters(), CLIP)
        gradients.append([one.grad.clone() for one in layers.parameters() if one.grad is not None])
        optimizer.step()
        numbers.append((loss.item(), norm.item()))
    with torch.no_grad():
        last = functional.cross_entropy(layers(data.tensors[0]), data.tensors[1])
    return numbers, gradients, layers.state_dict(), float(last)


class Watch(Callback):
    """Keeps numbers and whole gradients of each step."""

    def __init__(self) -> None:
        self.numbers: list[tuple[float, float]] = []
        self.gradients: list[list[Tensor]] = []

    def measured(self, run: TrainingLoop, row: dict[str, float]) -> None:
        self.numbers.append((row["loss"], row["grad_norm"]))

    def after_step(self, run: TrainingLoop) -> None:
        self.gradients.append([gradient.clone() for _, gradient in run.engine.named_gradients()])


def fitted(plan: Plan, steps: int = STEPS, *callbacks: Callback, **options: Any) -> Any:
    watch = Watch()
    validation = plait.Loader(dataset(), batch=7)
    result = plait.fit(
        model(),
        plan,
        plait.Loader(dataset(), batch=8, seed=5),
        steps=steps,
        learning_rate=rate,
        clip=CLIP,
        validation=validation,
        callbacks=[*callbacks, watch],
        **options,
    )
    state = result.engine.state_dict(everywhere=True)
    return watch.numbers, watch.gradients, state, result.validation_loss, result.steps, result.stopped


@pytest.mark.parametrize("name", PLANS)
def test_fit_trains_as_a_plain_pytorch_loop_on_every_plan(thread_ranks: RankPool, name: str) -> None:
    numbers, gradients, state, validation = plain()
    for found in thread_ranks.run(fitted, PLANS[name], ranks=PLANS[name].world):
        assert found[0] == [pytest.approx(one, rel=1e-12) for one in numbers]
        for ours, theirs in zip(found[1], gradients, strict=True):
            assert all(torch.allclose(a, b, rtol=0, atol=1e-13) for a, b in zip(ours, theirs, strict=True))
        assert all(torch.allclose(found[2][key], state[key], rtol=0, atol=1e-11) for key in state)
        assert found[3:] == (pytest.approx(validation, rel=1e-11), STEPS, False)


def test_the_progress_callback_prints_lines_for_a_model_without_language_data(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plait.fit(model(), Plan(), plait.Loader(dataset(), batch=8), steps=2, callbacks=[Progress()])
    assert "step 2/2  loss " in capsys.readouterr().out


def resumed(folder: Path, plan: Plan, steps: int) -> Any:
    log = Log(JsonLines(folder / "rows.jsonl"))
    return fitted(plan, steps, Checkpoints(folder, every=3), log, ReplicaChecks(2))


def test_a_run_that_goes_on_under_another_plan_is_the_same(
    thread_ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped in the middle of an epoch; its log has each step once."""
    numbers, _, state, _ = plain()
    thread_ranks.run(resumed, tmp_path, PLANS["pp"], 4, ranks=2)
    for found in thread_ranks.run(resumed, tmp_path, PLANS["dp"], STEPS, ranks=2):
        assert found[0] == [pytest.approx(one, rel=1e-11) for one in numbers[4:]]
        assert all(torch.allclose(found[2][key], state[key], rtol=0, atol=1e-11) for key in state)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["loss"] for row in rows] == [pytest.approx(one, rel=1e-11) for one, _ in numbers]
    assert [row["lr"] for row in rows] == [rate(step) for step in range(STEPS)]
    assert capsys.readouterr().out.count("Resumed from") == 1


@pytest.mark.parametrize(
    ("optimizer", "decay", "used"),
    [
        (torch.optim.SGD, None, [0.0, 0.0]),
        (torch.optim.AdamW, None, [0.01, 0.0]),
        (partial(torch.optim.AdamW, weight_decay=0.3), None, [0.3, 0.0]),
        (partial(torch.optim.AdamW, weight_decay=0.3), 0.3, [0.3, 0.0]),
        (torch.optim.SGD, 0.2, [0.2, 0.0]),
    ],
)
def test_weight_decay_is_the_optimizers_own_unless_fit_is_given_one(
    optimizer: Any, decay: float | None, used: list[float]
) -> None:
    loader = plait.Loader(dataset(), batch=8)
    result = plait.fit(model(), PLANS["one"], loader, steps=1, optimizer=optimizer, weight_decay=decay)
    assert [group["weight_decay"] for group in result.optimizer.param_groups] == used


@pytest.mark.parametrize(
    ("others", "decay", "used"),
    [
        (None, 0.3, {(True, 0.3), (False, 0.3), (False, 0.0)}),
        (None, 0.0, {(True, 0.0), (False, 0.0)}),
        ({"weight_decay": 0.2}, 0.3, {(True, 0.3), (False, 0.2), (False, 0.0)}),
        (None, None, {(True, 0.1), (False, 0.01), (False, 0.0)}),
    ],
)
def test_weight_decay_that_fit_is_given_is_that_of_all_matrices_under_muon(
    others: dict[str, float] | None, decay: float | None, used: set[tuple[bool, float]]
) -> None:
    optimizer = partial(plait.Muon, others=others)
    llama = plait.models.llama(layers=1, hidden=8, heads=2, vocab=11, context=6)
    tokens = TensorDataset(torch.zeros(4, 6, dtype=torch.int64), torch.zeros(4, 6, dtype=torch.int64))
    loader = plait.Loader(tokens, batch=4)
    result = plait.fit(llama, Plan(), loader, steps=1, optimizer=optimizer, weight_decay=decay)
    groups = [group for group in result.optimizer.param_groups if group["params"]]
    assert {(group["algorithm"] == "muon", group["weight_decay"]) for group in groups} == used


@pytest.mark.parametrize(
    ("options", "given", "told"),
    [
        ({"weight_decay": 0.3}, {"weight_decay": 0.1}, "weight_decay is 0.1, .* given weight_decay = 0.3"),
        ({"lr": 0.3}, {"learning_rate": 0.1}, "learning_rate is 0.1, .* given lr = 0.3"),
    ],
)
def test_an_option_that_fit_and_the_optimizer_are_given_differently_is_refused(
    options: dict[str, float], given: dict[str, float], told: str
) -> None:
    made, loader = partial(torch.optim.SGD, **options), plait.Loader(dataset(), batch=8)
    with pytest.raises(ConfigError, match=told):
        plait.fit(model(), PLANS["one"], loader, steps=1, optimizer=made, **given)


@pytest.mark.parametrize("named", [None, 0.5])
def test_a_run_that_goes_on_has_the_options_of_its_new_optimizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], named: float | None
) -> None:
    """Which are said; a rate that the run sets in each step is none of them."""

    def run(steps: int, decay: float, factor: float, **options: Any) -> dict[str, Any]:
        rate = named and named * factor
        loader = plait.Loader(dataset(), batch=8, seed=5)
        made = partial(torch.optim.SGD, **options | ({"lr": rate} if rate else {}))
        given = {"optimizer": made, "weight_decay": decay, "learning_rate": rate}
        kept = Checkpoints(tmp_path)
        result = plait.fit(model(), PLANS["one"], loader, steps=steps, callbacks=[kept], **given)
        group: dict[str, Any] = result.optimizer.param_groups[0]
        return {name: group[name] for name in ("lr", "momentum", "weight_decay")}

    run(1, 0.1, 1.0, lr=0.1, momentum=0.9)
    capsys.readouterr()
    found = run(2, 0.0, 0.5, lr=0.001, momentum=0.5)
    assert found == {"lr": 0.25 if named else 0.001, "momentum": 0.5, "weight_decay": 0.0}
    rate = "" if named else "lr 0.001 in place of 0.1, "
    assert capsys.readouterr().out.endswith(
        "The optimizer's settings are those given, not those of the checkpoint: "
        f"{rate}momentum 0.5 in place of 0.9, weight_decay 0.0 in place of 0.1.\n"
    )


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (plait.Loader(dataset(), batch=8, seed=6), "seed = 6, and had 5 when .* was written: give the same"),
        (plait.Loader(dataset(), batch=4, seed=5), "size = 4, and had 8"),
        (plait.Loader(dataset(), batch=8, seed=5, shuffle=False), "shuffle = False, and had True"),
        (plait.Loader(TensorDataset(*dataset()[:20]), batch=8, seed=5), "samples = 20, and had 22"),
    ],
    ids=["seed", "size", "shuffle", "samples"],
)
def test_a_run_goes_on_with_the_same_batches_only(
    tmp_path_factory: pytest.TempPathFactory, others: plait.Loader, message: str
) -> None:
    folder = tmp_path_factory.getbasetemp() / "same-batches"
    if not folder.exists():
        fitted(PLANS["one"], 2, Checkpoints(folder))
    with pytest.raises(DataError, match=message):
        plait.fit(model(), PLANS["one"], others, steps=4, callbacks=[Checkpoints(folder)])


def answered(plan: Plan) -> list[float]:
    """Tokens whose loss counts, of rows that each have one answer token more than the one before."""
    tokens = torch.arange(24).view(6, 4)
    targets = torch.where(torch.arange(4) < torch.arange(6)[:, None] % 4, tokens, -100)
    with torch.device("meta"):
        layers = nn.Sequential(nn.Embedding(24, 4), nn.Linear(4, 24)).double()
    history, loader = History(), plait.Loader(TensorDataset(tokens, targets), batch=4, shuffle=False)
    plait.fit(layers, plan, loader, steps=2, callbacks=[history])
    return [row[name] for row in history.rows for name in ("tokens", "trained_tokens")]


@pytest.mark.parametrize("name", PLANS)
def test_tokens_whose_loss_counts_are_counted(thread_ranks: RankPool, name: str) -> None:
    found = thread_ranks.run(answered, PLANS[name], ranks=PLANS[name].world)
    assert found == [[16, 0 + 1 + 2 + 3, 16, 0 + 1 + 0 + 1]] * PLANS[name].world


def accuracy(output: Tensor, targets: Tensor) -> Tensor:
    """Of the rows of class 1."""
    return (output.argmax(-1) == targets)[targets == 1]


def validated(plan: Plan) -> list[dict[str, float]]:
    history, data = History(), dataset()
    validation = plait.Loader(torch.utils.data.Subset(data, range(11)), batch=2, shuffle=False)
    plait.fit(
        model(),
        plan,
        plait.Loader(data, batch=8),
        steps=5,
        learning_rate=0.0,
        validation=validation,
        validate_every=3,
        metrics={"accuracy": accuracy},
        callbacks=[history],
    )
    return history.rows


def test_metrics_are_computed_over_the_whole_validation_set() -> None:
    """The last of its batches has one row; `parity/test_validation.py` has all plans."""
    inputs, targets = (part[:11] for part in dataset().tensors)
    output, rows = model()(inputs), validated(PLANS["one"])
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["step"] for row in rows if "validation_accuracy" in row] == [3, 5]
    assert {row["trained_tokens"] for row in rows} == {8}
    wanted = functional.cross_entropy(output, targets).item()
    assert rows[-1]["validation_loss"] == pytest.approx(wanted, rel=1e-12)
    assert rows[-1]["validation_accuracy"] == accuracy(output, targets).double().mean().item()


def fit_quietly(batches: Any, steps: int, **options: Any) -> Any:
    return plait.fit(model(), PLANS["one"], batches, steps=steps, learning_rate=0.0, **options)


def test_a_long_validation_is_announced(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = plait.Loader(dataset(), batch=8)
    fit_quietly(data, 1, validation=data)
    assert "is computed" not in capsys.readouterr().out
    monkeypatch.setattr("plait.app.loop.validation._LONG", 0.0)
    fit_quietly(data, 1, validation=data)
    assert "step 1: the validation loss is computed of 22 rows, in about " in capsys.readouterr().out


def test_fit_of_a_finished_run_says_that_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for steps in (3, 2):
        fit_quietly(plait.Loader(dataset(), batch=8), steps, callbacks=[Checkpoints(tmp_path)])
    assert "3 steps were done before, and the run has 2: none is left to take." in capsys.readouterr().out


class Endless:
    """Batches that name no number of rows."""

    size = 4

    def batch(self, step: int, rows: slice) -> Any:
        return tuple(part[: self.size][rows] for part in dataset().tensors)


def test_fit_reports_rows_that_are_not_taken_exactly_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of a validation with a limit, a batch larger than the data, rows that are taken once more."""
    whole, few = plait.Loader(dataset(), batch=8), plait.Loader(TensorDataset(*dataset()[:3]), batch=8)
    for loader, steps, options, said in (
        (whole, 2, {"validation": whole}, ""),
        (
            whole,
            1,
            {"validation": whole, "validate_batches": 2},
            "Validation takes the first 16 of 22 rows.\n",
        ),
        (whole, 1, {"validation": whole, "validate_batches": 3}, ""),
        (
            whole,
            1,
            {"validation": Endless()},
            "Validation takes the first batch, 4 rows, since the data have no ",
        ),
        (
            whole,
            3,
            {},
            "Data: 3 steps of 8 rows are 1.09 epochs of 22 rows: 2 of them are taken 2 times, the ",
        ),
        (whole, 11, {}, ""),
        (
            few,
            3,
            {},
            "WARNING: a batch has 8 rows, and rows come again after 3: some are in a batch more than ",
        ),
    ):
        fit_quietly(loader, steps, **options)
        told = capsys.readouterr().out
        lines = [line for line in told.splitlines(keepends=True) if not line.startswith("step ")]
        assert "".join(lines).startswith(said), said
        assert len(lines) == bool(said)


def test_fit_validates_on_several_named_data_sets_and_watches_one(tmp_path: Path) -> None:
    near = plait.Loader(TensorDataset(dataset().tensors[0], 1 - dataset().tensors[1]), batch=8)
    history, options = History(), {"validate_every": 1, "metrics": {"accuracy": accuracy}}
    data = {"held-out": plait.Loader(dataset(), batch=8), "other": near}
    kept = Checkpoints(tmp_path, keep_best=True, watch="other")
    result = fit_quietly(
        plait.Loader(dataset(), batch=8), 2, validation=data, callbacks=[kept, history], **options
    )
    row = history.rows[-1]
    assert result.validation_losses == {name: row[f"validation_{name}_loss"] for name in data}
    assert (
        result.validation_loss
        == row["validation_held-out_loss"]
        == fit_quietly(plait.Loader(dataset(), batch=8), 1, validation=data["held-out"]).validation_loss
    )
    assert row["validation_held-out_accuracy"] > row["validation_other_accuracy"]
    best = json.loads((tmp_path / "best.json").read_text())
    assert best == {"step": 1, "validation_loss": result.validation_losses["other"]}


def test_fit_refuses_misfitting_batches_data_and_learning_rates(thread_ranks: RankPool) -> None:
    def odd() -> None:
        plait.fit(model(), PLANS["dp"], plait.Loader(dataset(), batch=3), steps=1)

    with pytest.raises(DataError, match=r"batches have 3 rows, which 2 data-parallel .* of 2 rows, or"):
        thread_ranks.run(odd, ranks=2)
    loader = plait.Loader(dataset(), batch=8)
    with pytest.raises(DataError, match=r"an object of DataLoader, without size .*: give a plait\.Loader"):
        plait.fit(model(), Plan(), torch.utils.data.DataLoader(dataset()), steps=1)  # type: ignore[arg-type]
    made: Any = torch.optim.SGD(model().parameters())
    with pytest.raises(ConfigError, match="optimizer is an object of SGD: give its class, or a function"):
        plait.fit(model(), Plan(), loader, steps=1, optimizer=made)
    with pytest.raises(ConfigError, match="validate_batches or metrics are given, but no batches"):
        plait.fit(model(), Plan(), loader, steps=1, validate_every=2)

    def two_rates(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.SGD([{**groups[0], "lr": 0.5}, groups[1]], lr=0.1)

    with pytest.raises(ConfigError, match=r"learning rates from 0\.1 to 0\.5, which learning_rate would"):
        plait.fit(model(), Plan(), loader, steps=1, optimizer=two_rates, learning_rate=1.0)
    assert plait.fit(model(), Plan(), loader, steps=1, optimizer=two_rates).steps == 1
    with pytest.raises(
        NonFiniteError, match=r"step [23]: the .*: lower the learning rate or raise its warm-up"
    ):
        plait.fit(model(), Plan(), loader, steps=3, learning_rate=1e300)
