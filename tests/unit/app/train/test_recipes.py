"""What a configuration says of optimizer, learning rate, epochs, frozen parameters and samples is done."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from train_runs import make, rows, run

import plait
from plait.app.cli.plan_output import config_text
from plait.app.config.config import Config, configured_decoder
from plait.app.config.config_parser import config_from_arguments, fields, nearest_field
from plait.app.config.train_section import OPTIONS, TrainConfig
from plait.app.train.predicted_run import optimizer_moments
from plait.app.train.trainer import build_learning_rate, model_to_train, optimizer_maker, run_groups
from plait.checkpoint.inspecting import summary
from plait.errors import ConfigError, PlanError
from plait.estimate.memory.whole_parameter_owners import muon_of
from plait.optimizers.optimizer_makers import MuonSettings, class_and_settings_of_owned, optimizer_for
from plait.plan.parameter_units import PRECISIONS
from plait.ranks.launch.rank_pool import RankPool

EVERY_CLASS = {"params", "lr", "weight_decay"}
IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable", "maximize"}


OF_TORCH = [name for name in OPTIONS if name != "Muon"]


def given(text: str) -> Config:
    return config_from_arguments(text.split())


def trained(
    pool: RankPool, folder: Path, parallel: dict[str, Any], **settings: Any
) -> list[dict[str, float]]:
    """The rows of a run of four steps in float64."""
    run_settings = settings.pop("run", {})
    config = make(folder, precision="fp64", **{"microbatches": 1, "lr": 0.01} | settings)
    sections = {"parallel": parallel, "run": config.run.model_dump() | run_settings}
    run(pool, Config.model_validate(config.model_dump() | sections | {"data": {"source": "random"}}))
    return rows(folder)


def test_the_options_of_an_optimizer_are_those_of_torch() -> None:
    for name in OF_TORCH:
        parameters = inspect.signature(getattr(torch.optim, name)).parameters
        own = {*parameters} - EVERY_CLASS - IMPLEMENTATION - ({"eps"} if name == "Adafactor" else set())
        taken = [option for option in OPTIONS[name] if option != "owned"]
        assert own - {"initial_accumulator_value"} == {*taken}
        for option in {*taken} - {"betas", "eps"}:
            told = fields()[f"train.optimizer.{option}"]["description"]
            default = parameters[option].default
            shown = str(default).lower() if isinstance(default, bool) else f"{default:g}"
            assert f"; none: {shown}" in told, told


def test_an_optimizer_by_name_has_the_options_that_are_given() -> None:
    for name in OF_TORCH:
        settings = TrainConfig.model_validate({"optimizer": name.lower(), "lr": 0.5})
        made = optimizer_maker(settings)([{"params": [torch.nn.Parameter(torch.ones(2, 2))]}])
        assert type(made) is getattr(torch.optim, name)
        (group,) = made.param_groups
        assert group["lr"] == 0.5
        if "betas" in OPTIONS[name]:
            assert group["betas"] == (0.9, 0.95)


def test_the_moments_are_those_that_the_optimizer_keeps() -> None:
    for name in OF_TORCH:
        options = OPTIONS[name]
        for option in (None, *(one for one in ("momentum", "centered", "amsgrad") if one in options)):
            optimizer = {"name": name} | (
                {} if option is None else {option: 0.5 if option == "momentum" else True}
            )
            settings = TrainConfig.model_validate({"optimizer": optimizer})
            parameter = torch.nn.Parameter(torch.ones(2, 3))
            parameter.grad = torch.ones(2, 3)
            made = optimizer_maker(settings)([{"params": [parameter]}])
            made.step()
            kept = [one for one in made.state[parameter].values() if getattr(one, "shape", ()) == (2, 3)]
            assert settings.optimizer.moments == len(kept), optimizer


def test_options_reach_the_optimizer_and_its_memory_is_predicted(tmp_path: Path) -> None:
    config = given("--train.optimizer SGD --train.optimizer.momentum 0.9 --train.optimizer.nesterov true")
    (group,) = optimizer_maker(config.train)([{"params": [torch.nn.Parameter(torch.ones(1))]}]).param_groups
    assert (group["momentum"], group["nesterov"], group["dampening"]) == (0.9, True, 0)
    assert (config.train.matrix_decay, Config().train.matrix_decay) == (0.0, 0.1)
    assert config.train.optimizer.moments == 1
    assert given("--train.optimizer muon").train.optimizer.moments == "muon"
    assert optimizer_moments(config.train) == 1
    in_fp32 = given("--train.optimizer muon --train.optimizer.iterations fp32").train
    assert muon_of(optimizer_moments(in_fp32)) == MuonSettings(dtype=PRECISIONS["fp32"])
    owned = given("--train.optimizer adafactor --train.optimizer.owned true").train
    assert class_and_settings_of_owned(optimizer_moments(owned))[0] is torch.optim.Adafactor
    assert TrainConfig(weight_decay=0.0).matrix_decay == 0.0
    assert TrainConfig(optimizer=config.train.optimizer, weight_decay=0.3).matrix_decay == 0.3
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    folder = Config.model_validate({"model": {"name": str(tmp_path)}})
    assert configured_decoder(folder) is configured_decoder(config) is None, "sizes do not say all"


def test_unknown_optimizers_schedules_and_options_are_refused_by_name() -> None:
    for text, message in [
        (
            "--train.optimizer lion",
            'train.optimizer.name is "lion" (from the command line): give one of AdamW',
        ),
        (
            "--train.optimizer.momentum 0.9",
            "momentum = 0.9 is an option of SGD, RMSprop, Muon, and train.optimizer",
        ),
        ("--train.optimizer SGD --train.betas 0.9,0.95", "train.betas = (0.9, 0.95) is an option of AdamW"),
        ("--train.optimizer SGD --train.eps 1e-8", "train.eps = 1e-08 is an option of AdamW"),
        ("--train.optimizer.momentun 0.9", "did you mean train.optimizer.momentum?"),
        ("--train.optimizer SGD --train.optimizer.nesterov true", "is true, which needs a momentum"),
        ("--train.schedule cosin", 'train.schedule.name is "cosin"'),
        ("--train.schedule.decay 5", "train.schedule.decay = 5 is an option of wsd"),
        ("--train.schedule wsd --train.schedule.decay 290", "and train.schedule.decay = 290 are more than"),
        (
            "--train.schedule constant --train.min_lr 0.1",
            "train.schedule.name is constant, which does not fall",
        ),
        ("--train.epochs 1 --train.steps 5", "train.epochs = 1 and train.steps = 5 are both given"),
        ("--train.epochs 1 --data.source random", "data.source = random has no end"),
        ("--train.epochs 1 --data.mixture a=1,b=2", "each source of data.mixture has epochs of its own"),
        ("--data.source x --data.mixture a=1,b=2", "data.source = 'x' and data.mixture are both given"),
        ("--train.freeze a,a", "train.freeze has the pattern 'a' twice"),
        ('--train.rates [{"pattern":"a","scale":1,"lr":1}]', "gives 'a' scale = 1 and lr = 1: leave one"),
        ('--train.rates [{"pattern":"a"}]', "has pattern = 'a' and nothing for it: add scale"),
        ('--train.rates [{"patern":"a"}]', "a table of train.rates has 'patern': did you mean pattern?"),
        (
            '--train.freeze a --train.rates [{"pattern":"a","lr":1}]',
            "'a' is in train.rates and in train.freeze",
        ),
        ("--train.watch a", "train.watch = 'a' names a validation, but there are none with a name"),
        (
            '--data.validation_source {"a":"x"} --train.watch b',
            "but there are those of data.validation_source, a",
        ),
        ('--data.validation_source {"a":"x"} --train.watch a', "without train.patience or run.keep_best"),
        ('--data.validation_source {"a*b":"x"}', "has 'a*b' = 'x': give a name of letters"),
        ("--train.sample_every 5", "train.sample_every = 5 is given without a prompt"),
        (
            "--run.save_minutes 5 --run.save_every none",
            "run.save_minutes = 5 is given, but run.save_every is none",
        ),
    ]:
        with pytest.raises(ConfigError) as refused:
            given(text)
        assert message in str(refused.value)


def test_a_misspelled_field_suggests_the_nearest_of_its_own_section() -> None:
    for given, near in [
        ("train.optimiser", "train.optimizer"),
        ("train.lr_scheduler", "train.schedule"),
        ("train.learning_rate", "train.lr"),
        ("train.momentum", "train.optimizer.momentum"),
        ("train.num_epochs", "train.epochs"),
        ("train.keep_best", "run.keep_best"),
    ]:
        assert nearest_field(given) == near


def test_optimizer_tables_with_torchs_names_are_understood(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[train]\nsteps = 50\n[train.optimizer]\nname = "SGD"\nlr = 0.1\nmomentum = 0.9\n'
        "weight_decay = 0.01\n"
        '[train.schedule]\nname = "WSD"\nwarmup = 5\nmin_lr = 0.0\n'
        '[[train.rates]]\npattern = "embedding"\nscale = 0.5\n'
        '[data.validation_source]\nprose = "a"\ncode = "b"\n'
    )
    config = given(f"--config {file} --train.epochs 2")
    train = config.train
    assert (train.lr, train.optimizer.momentum, train.weight_decay) == (0.1, 0.9, 0.01)
    assert (train.schedule.name, train.warmup, train.min_lr) == ("wsd", 5, 0.0)
    assert (train.epochs, [*config.data.validation_sources]) == (2.0, ["prose", "code"])
    written = tmp_path / "written.toml"
    written.write_text(config_text(config, config.plan()))
    again = given(f"--config {written}")
    assert (again.train.rates, again.data, again.train.optimizer) == (
        train.rates,
        config.data,
        train.optimizer,
    )
    file.write_text("[train]\nlr = 0.1\n[train.optimizer]\nlr = 0.2\n")
    with pytest.raises(ConfigError, match=r"train\.lr is given twice in .*, also as train\.optimizer\.lr"):
        given(f"--config {file}")


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"name": "constant"}, [0.5, 1, 1, 1, 1, 1, 1, 1]),
        ({"name": "linear"}, [0.5, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0]),
        ({"name": "wsd", "decay": 2}, [0.5, 1, 1, 1, 1, 1, 0.5, 0]),
        ({"name": "wsd"}, [0.5, 1, 1, 1, 1, 1, 1, 0]),
    ],
    ids=str,
)
def test_learning_rate_schedules_by_name_give_the_listed_rates(
    schedule: dict[str, Any], expected: list[float]
) -> None:
    floor = {} if schedule["name"] == "constant" else {"min_lr": 0.0}
    settings = TrainConfig.model_validate({"steps": 8, "warmup": 2, "lr": 1.0, "schedule": schedule} | floor)
    assert [*map(build_learning_rate(settings), range(8))] == pytest.approx(expected)


PARALLEL: dict[str, dict[str, Any]] = {
    "SGD": {"pp": 2},
    "Adafactor": {"tp": 2},
    "NAdam": {"dp": 2, "strategy": "full"},
}


@pytest.mark.full
@pytest.mark.parametrize("name", PARALLEL)
def test_an_optimizer_is_the_same_on_every_plan(thread_ranks: RankPool, tmp_path: Path, name: str) -> None:
    more: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9}, "Adafactor": {"owned": True}}
    options = {"name": name} | more.get(name, {})
    alone, parallel = (
        trained(thread_ranks, tmp_path / str(number), plan, optimizer=options, schedule="wsd")
        for number, plan in enumerate([{}, PARALLEL[name]])
    )
    for one, other in zip(alone, parallel, strict=True):
        for key in ("loss", "grad_norm", "lr"):
            assert other[key] == pytest.approx(one[key], rel=1e-12)
    assert len({row["loss"] for row in alone}) == 4


def test_an_optimizer_that_a_plan_does_not_allow_is_refused_before_files_move(
    thread_ranks: RankPool, tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match="Adafactor divides an element by the mean squares"):
        trained(thread_ranks, tmp_path, {"tp": 2}, optimizer="Adafactor")
    assert [path.name for path in tmp_path.iterdir()] in ([], ["run.lock"])


def test_muon_trains_alike_on_every_plan_with_the_rates_of_its_groups_and_a_resumption(
    thread_ranks: RankPool, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "optimizer": {"name": "muon", "iterations": "fp64", "others_lr": 0.002, "per_head": True},
        "rates": [{"pattern": "mlp.up", "scale": 0.5, "weight_decay": 0.3}],
        "schedule": "constant",
        "warmup": 0,
    }
    whole = trained(thread_ranks, tmp_path / "whole", {}, **settings)
    trained(thread_ranks, tmp_path / "cut", {"pp": 2}, **settings, steps=2)
    resumed = trained(
        thread_ranks, tmp_path / "cut", {"dp": 2, "strategy": "full"}, **settings, run={"resume": "auto"}
    )
    for one, other in zip(whole, resumed, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-10)
    lines = (tmp_path / "whole" / "run.json").read_text()
    assert "Muon   2 of 8" in lines
    assert "AdamW  an embedding" in lines


def test_options_of_muon_reach_its_groups(thread_ranks: RankPool) -> None:
    options = {"name": "Muon", "ns_steps": 3, "momentum": 0.8, "nesterov": False, "adjust_lr_fn": "original"}
    settings = TrainConfig.model_validate(
        {
            "optimizer": {**options, "others_lr": 0.5},
            "lr": 2.0,
            "weight_decay": 0.3,
            "betas": (0.8, 0.9),
            "rates": [{"pattern": "mlp.up", "scale": 0.25, "weight_decay": 0.7}],
        }
    )
    groups = thread_ranks.run(_groups_of, settings, ranks=1)[0]
    of_muon = [group for group in groups if group["algorithm"] == "muon" and group["names"]]
    of_adamw = [group for group in groups if group["algorithm"] == "adamw" and group["names"]]
    known = {(group["lr"], group["ns_steps"], group["momentum"], group["nesterov"]) for group in of_muon}
    assert known == {(2.0, 3, 0.8, False)}
    assert {group["adjust_lr_fn"] for group in of_muon} == {"original"}
    found = {name: group for group in (*of_muon, *of_adamw) for name in group["names"]}
    for name, scale, decay in [
        ("blocks.0.mlp.up.weight", 0.25, 0.7),
        ("blocks.0.mlp.up.bias", 0.25 * 0.25, 0.7),
        ("blocks.0.mlp.down.weight", 1.0, 0.3),
        ("blocks.0.mlp.down.bias", 0.25, 0.0),
        ("embedding.token.weight", 0.25, 0.3),
    ]:
        assert (found[name]["lr_scale"], found[name]["weight_decay"], found[name]["lr"]) == (
            scale,
            decay,
            2.0,
        )
    assert {group["betas"] for group in of_adamw} == {(0.8, 0.9)}


def _groups_of(settings: TrainConfig) -> list[dict[str, Any]]:
    """The groups of the optimizer of a small model on this rank, with names in place of parameters."""
    model = plait.models.gpt2(layers=1, hidden=8, heads=2, vocab=8, context=4)
    engine = plait.parallelize(model, plait.Plan(), plait.Mesh(plait.Plan()), loss=plait.cross_entropy)
    names = {parameter: name for name, parameter in engine.named_parameters()}
    made = optimizer_for(engine, optimizer_maker(settings), run_groups(engine, settings))
    return [
        {**{key: one for key, one in group.items() if key != "params"}}
        | {"names": [names[one] for one in group["params"]]}
        for group in made.param_groups
    ]


def test_epochs_are_steps_and_a_run_resumes_into_more_of_them(thread_ranks: RankPool, tmp_path: Path) -> None:
    """50 windows of 16 tokens: 12.5 batches of 4 are an epoch."""
    text = tmp_path / "text"
    text.write_bytes(bytes(32 + number * number % 90 for number in range(16 * 50 + 1)))

    def epochs(folder: str, count: float, **options: Any) -> list[dict[str, float]]:
        config = make(tmp_path / folder, precision="fp64", lr=0.01, schedule="constant")
        tree = config.model_dump()
        tree["train"] = {
            **{key: one for key, one in tree["train"].items() if key != "steps"},
            "epochs": count,
        }
        tree["data"] |= {"source": str(text), "validation": 0.0}
        tree["run"] |= options.pop("run", {})
        run(thread_ranks, Config.model_validate(tree | options))
        return rows(tmp_path / folder)

    whole = epochs("whole", 1)
    assert len(whole) == 13
    assert json.loads((tmp_path / "whole" / "config.json").read_text())["train"]["steps"] == 13
    assert len(epochs("cut", 0.32)) == 4
    with pytest.raises(ConfigError, match=r"train\.epochs = 1e\+300 are 1\.25e\+301 steps, more than"):
        epochs("long", 1e300)
    resumed = epochs("cut", 1, run={"resume": "auto"}, parallel={"dp": 2})
    assert len(resumed) == 13
    for one, other in zip(whole, resumed, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-12)


def test_frozen_parameters_stay_and_rates_by_pattern_survive_a_resumption(
    thread_ranks: RankPool, tmp_path: Path
) -> None:
    """A rate of 0 freezes as well; with SGD an update is the rate times the gradient."""
    settings: dict[str, Any] = {
        "optimizer": {"name": "SGD", "momentum": 0.9},
        "freeze": ["embedding.position"],
        "rates": [
            {"pattern": "mlp.up", "scale": 0.5, "weight_decay": 0.1},
            {"pattern": "blocks.0.attention", "lr": 0.0},
        ],
        "schedule": "constant",
        "warmup": 0,
    }
    whole = trained(thread_ranks, tmp_path / "whole", {}, **settings)
    trained(thread_ranks, tmp_path / "cut", {"pp": 2}, **settings, steps=2)
    resumed = trained(
        thread_ranks, tmp_path / "cut", {"dp": 2, "strategy": "full"}, **settings, run={"resume": "auto"}
    )
    for one, other in zip(whole, resumed, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-12)
    other = {**settings, "rates": []}
    assert trained(thread_ranks, tmp_path / "other", {}, **other)[-1]["loss"] != whole[-1]["loss"]
    saved = summary(tmp_path / "whole" / "checkpoints")
    assert not [one.name for one in saved.tensors if "optim" in one.name and "embedding.position" in one.name]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"freeze": ["blocks.0.attn"]},
            r"'blocks\.0\.attn' of train\.freeze fits .*nearest are blocks\.0\.att",
        ),
        ({"freeze": ["*"]}, r"train\.freeze = \[\*\] freezes all parameters: leave some"),
        (
            {"rates": [{"pattern": "embeding", "scale": 0.1}]},
            r"of train\.rates fits .*nearest are embedding\.",
        ),
        (
            {"freeze": ["embedding.position"], "rates": [{"pattern": "position", "lr": 1.0}]},
            r"'position' of train\.rates fits the name of no parameter",
        ),
    ],
    ids=str,
)
def test_a_pattern_that_fits_nothing_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_to_train(make(Path("nowhere"), **settings), 16)


def test_validations_by_name_and_samples_are_in_metrics_and_report(
    thread_ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("prose", "code"):
        (tmp_path / name).write_bytes(bytes(40 + number % 50 for number in range(16 * len(name) + 1)))
    config = make(tmp_path / "run", sample="def ", sample_tokens=3, sample_every=2, validate_every=2)
    tree = config.model_dump()
    tree["data"]["source"] = str(tmp_path / "prose")
    tree["data"]["validation_source"] = {name: str(tmp_path / name) for name in ("prose", "code")}
    tree["train"] |= {"watch": "code", "patience": 9}
    tree["run"] |= {"keep_best": 2, "notes": "the <first> try", "report": True}
    (result,) = run(thread_ranks, Config.model_validate(tree))
    written = rows(tmp_path / "run")
    named = {"prose": "validation_prose_loss", "code": "validation_code_loss"}
    assert [row["step"] for row in written if named["prose"] in row and named["code"] in row] == [2, 4]
    assert result.validation_losses == {name: written[-1][key] for name, key in named.items()}
    told = capsys.readouterr().out
    assert "Validation code: all 4 sequences." in told
    assert re.search(r"step 2: validation loss of prose \d", told)
    best = json.loads((tmp_path / "run" / "checkpoints" / "best.json").read_text())
    kept = [best, *best["others"]]
    losses = {row["step"]: row[named["code"]] for row in written if named["code"] in row}
    assert [one["validation_loss"] for one in kept] == sorted(losses.values())
    page = (tmp_path / "run" / "report.html").read_text()
    assert "the &lt;first&gt; try" in page
    assert page.count("<pre class=sample>") == 2
    plain = Config.model_validate(make(tmp_path / "plain").model_dump() | {"data": tree["data"]})
    run(thread_ranks, plain)
    assert [row["loss"] for row in rows(tmp_path / "plain")] == [row["loss"] for row in written]
