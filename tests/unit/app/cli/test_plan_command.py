"""`plait plan`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import plait
from parity import huggingface_cases as cases
from plait.app.cli.main import main
from plait.app.cli.plan_output import SEARCHED, calibration_text, change_lines
from plait.app.config.config import configured_decoder
from plait.app.config.config_parser import config_from_arguments
from plait.app.train.trainer import build_model, model_to_train
from plait.estimate.time.hardware import Link, load_hardware
from plait.pictures.quantities import count_text
from plait.plan.axes import PLAN_AXES
from plait.plan.decoder_sizes import decoder_of

SMALL = ["--hardware", "h100-sxm", "--model.layers", "2", "--train.batch", "6", "--train.precision", "bf16"]


def _printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    return json.loads(_printed(capsys, *arguments, "--json"))


def seconds_of(number: str, unit: str) -> float:
    return float(number) * {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[unit]


def test_quantities_of_small_models_are_printed_in_units_that_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """Of 0.4 million parameters, no quantity is 0 for want of a unit."""
    tiny = ["--hardware", "h100-sxm", "--model.layers", "1", "--model.hidden", "64", "--train.batch", "2"]
    for more in (["--ranks", "2"], ["--parallel.dp", "2", "--train.microbatches", "1"]):
        printed = _printed(capsys, *tiny, *more)
        assert re.search(r"(?<![\d.])0(\.0+)? (s|[GM]iB)\b|\d[eE]-\d", printed) is None, printed
        assert " MiB" in printed or " KiB" in printed
        assert " µs" in printed
    assert (count_text(842_496), count_text(1_235_814_400)) == ("842,496", "1.24 billion")


def test_a_search_prints_plans_fastest_first(capsys: pytest.CaptureFixture[str]) -> None:
    head, *lines = _printed(capsys, *SMALL, "--ranks", "2", "--most", "3").splitlines()
    assert head.split()[:3] == ["step", "tokens/s", "MFU"]
    seconds = [seconds_of(*line.split()[:2]) for line in lines[:3]]
    assert seconds == sorted(set(seconds)), "plans of the same time are in one row"
    assert lines[0].endswith(" more of the same time")
    assert "of the step" in lines[0]
    assert lines[4].startswith("Of ")
    alike = int(lines[0].split()[-6]) + 1
    assert f"{alike} plans are the fastest, of the same time; --json lists each plan." in lines
    assert lines[-1].startswith("The next time is ")


def test_the_written_configuration_has_the_fastest_plan_and_the_rest_as_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "best.toml"
    given = ["--data.source", 'a "b"', "--train.betas", "[0.8, 0.9]", "--run.compare", "0"]
    found = _json(capsys, *SMALL, *given, "--ranks", "4", "--write", str(file))
    config = config_from_arguments(["--config", str(file)])
    plan = config.plan()
    assert {name: getattr(plan, name) for name in (*SEARCHED, "microbatches")} == found["best"][0]["plan"]
    assert {*PLAN_AXES, "replicate", "ep", "etp", "strategy", "reduce", "schedule", "chunks"} < {*SEARCHED}
    assert len({*SEARCHED}) == len(SEARCHED) == 13
    assert plan.world == 4
    assert (config.model.layers, config.train.batch, config.data.source) == (2, 6, 'a "b"')
    assert (plan.precision, config.train.betas, config.run.compare) == ("bf16", (0.8, 0.9), 0)
    judged = _json(capsys, "--hardware", "h100-sxm", "--config", str(file))
    assert judged["step_seconds"] == found["best"][0]["step_seconds"]
    assert sum(judged["breakdown"].values()) == pytest.approx(judged["step_seconds"], rel=1e-12)


def test_a_judged_plan_has_changes_that_help(capsys: pytest.CaptureFixture[str]) -> None:
    given = [*SMALL, "--parallel.dp", "3", "--train.microbatches", "2", "--parallel.recompute", "full"]
    judged = _json(capsys, *given)
    first = judged["changes"][0]
    assert len({one["field"] for one in judged["changes"]}) == len(judged["changes"]) <= 3
    changed = _json(capsys, *given, f"--{first['field']}", str(first["value"]))
    assert changed["step_seconds"] - judged["step_seconds"] == pytest.approx(first["seconds"])
    assert changed["peak_memory"] - judged["peak_memory"] == pytest.approx(first["memory"])
    lines = _printed(capsys, *given).splitlines()
    assert "Changes of one field that help most:" in lines
    assert lines[-len(judged["changes"])].split()[0] == first["field"]
    assert change_lines([], True) == ["No change of one field makes it faster."]
    assert change_lines([], False) == ["No change of one field makes it fit."]


def test_figures_of_a_measured_machine_and_changes_that_do_not_help_are_said() -> None:
    found = replace(load_hardware("h100-sxm"), inside=Link(3e9, 2e-6), fitted="today")
    text = calibration_text(found)
    assert text.endswith(" takes 4 µs at least. All-reduce: 2 µs a step, 3 GB/s.")
    assert "TFLOP/s" in text
    alone = replace(found, fitted="today; links were not measured, theirs are guesses")
    assert calibration_text(alone).endswith("Links were not measured, with one rank: theirs are guesses.")
    assert change_lines([], True) == ["No change of one field makes it faster."]
    assert change_lines([], False) == ["No change of one field makes it fit."]


def test_impossible_divisions_are_counted_by_reason(capsys: pytest.CaptureFixture[str]) -> None:
    lines = _printed(capsys, *SMALL, "--ranks", "5", "--train.batch", "5").splitlines()
    assert "1 division of the ranks is impossible: tp does not divide the heads." in lines


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("tied", ["true", "false"])
def test_plait_plan_takes_the_sizes_of_the_built_model(name: str, tied: str) -> None:
    config = config_from_arguments(["--model.name", name, "--model.tied", tied, "--model.layers", "2"])
    sizes = configured_decoder(config)
    built = decoder_of(build_model(config.model, sizes.vocab))
    assert (built.inside, built.key_heads) == (sizes.inside, sizes.key_heads)
    assert built.total_parameters == sizes.total_parameters
    for field in ("layers", "hidden", "heads", "context", "gated", "biases", "positions", "rotary", "tied"):
        assert getattr(built, field) == getattr(sizes, field)


def test_plait_plan_refuses_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in [
        ("--ranks 2", "--hardware is missing: give a100-40,"),
        ("--calibrate x.toml --json", "--calibrate goes with --ranks only"),
        ("--ranks 0 --hardware h100-sxm", "not a whole number of at least 1"),
        ("--ranks 7919 --hardware h100-sxm --train.batch 4", "7919 ranks cannot be divided"),
        ("--ranks 2 --hardware nowhere.toml", "hardware nowhere.toml cannot be read"),
        ("--calibrate x.toml --html x.html", "--calibrate goes with --ranks only"),
        ("--hardware a100-80 --html nowhere/x.html", "nowhere/x.html cannot be written"),
        ("--hardware a100-80 --ranks 8 --write nowhere/x.toml", "nowhere/x.toml cannot be written"),
        ("--hardware a100-80 --write x.toml", "--write goes with --ranks"),
        ("--hardware a100-80 --most 3", "--most goes with --ranks: add that"),
        ("--hardware a100-80 --restart 3", "--restart goes with --mtbf: add that"),
        ("--hardware a100-80 --ranks 2 --parallel.tp 2", "--parallel.tp does not go with --ranks"),
        ("--hardware a100-80 --ranks 2 --parallel.dp=2", "--parallel.dp does not go with --ranks"),
        ("--hardware a100-80 --ranks 2 --parallel.ep 1", "--parallel.ep does not go with --ranks"),
        ("--hardware a100-80 --ranks 2 --train.microbatches 4", "microbatches does not go with --ranks"),
        ("--hardware a100-80 --mtbf 0", "--mtbf is 0: give hours above 0"),
        ("--calibrate x.toml --mtbf 3", "--calibrate goes with --ranks only"),
        ("--hardware a100-80 --ranks 2 --parallel.memory_limit 3", "memory_limit does not go with"),
        ("--hardware a100-40 --ranks 1 --model.hidden 65536 --model.layers 2", "none of "),
        ("--hardware a100-80 --modle.layers 3", "modle.layers"),
    ]:
        assert main(["plan", *arguments.split()]) == 2
        printed = capsys.readouterr()
        assert message in printed.err
        assert printed.err.count("\n") == 1
        assert not printed.out


@pytest.mark.parametrize(
    "options",
    [
        ("--model.lora.rank", "4", "--parallel.dp", "2"),
        pytest.param(
            ("--parallel.dp", "2", "--parallel.strategy", "full", "--parallel.offload", "full"),
            marks=pytest.mark.full,
        ),
        pytest.param(("--train.freeze", "head.*", "--train.optimizer", "SGD"), marks=pytest.mark.full),
    ],
    ids=["lora", "offload", "frozen"],
)
def test_a_plan_is_judged_by_what_the_configuration_trains(
    options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--model.layers", "1", "--model.hidden", "32", "--model.heads", "2", "--train.batch", "8")
    found = _json(capsys, "--hardware", "h100-sxm", *sizes, *options)
    config = config_from_arguments([*sizes, *options])
    model = model_to_train(config, 256)
    rows = torch.empty(8 // config.parallel.dp, config.model.context, dtype=torch.int64, device="meta")
    moments = config.train.optimizer.moments
    exact = plait.memory(model, config.plan(), rows, moments=moments, device="cuda")
    assert found["peak_memory"] == exact.most
    assert found["step_seconds"] > 0


@pytest.mark.full
@pytest.mark.transformers
def test_a_folder_with_experts_is_planned_for_balanced_routing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases.mixtral(vocab_size=300).save_pretrained(tmp_path / "mixtral")
    options = ("--model.name", str(tmp_path / "mixtral"), "--hardware", "h100-sxm", "--train.batch", "8")
    sentence = "Routing is assumed to be balanced: each expert computes equally many tokens."
    found = _json(capsys, *options, "--parallel.dp", "2")
    assert found["assumptions"] == [sentence]
    html = tmp_path / "plan.html"
    printed = _printed(capsys, *options, "--parallel.dp", "2", "--html", str(html))
    assert sentence in printed.splitlines()
    assert sentence in html.read_text()
    assert sentence in _printed(capsys, *options, "--ranks", "1", "--most", "1").splitlines()
    assert _json(capsys, *SMALL, "--train.microbatches", "2")["assumptions"] == []


TINY_SPARSE = (
    *("--hardware", "h100-sxm", "--model.name", "llama", "--model.layers", "1", "--model.hidden", "32"),
    *("--model.heads", "2", "--model.experts", "2", "--model.inner", "16", "--model.context", "16"),
    *("--train.batch", "2"),
)


@pytest.mark.full
def test_a_search_of_a_model_with_experts_chooses_their_division(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, html = tmp_path / "best.toml", tmp_path / "plans.html"
    asked = ("--ranks", "2", "--most", "1", "--write", str(file))
    head, *_ = _printed(capsys, *TINY_SPARSE, *asked).splitlines()
    assert head.split()[4:11] == ["pp", "tp", "cp", "dp", "ep", "etp", "copies"]
    plan = config_from_arguments(["--config", str(file)]).plan()
    assert (plan.world, plan.edp * plan.ep * plan.etp) == (2, 2 // plan.pp)
    divided = "--parallel.dp", "2", "--parallel.ep", "2", "--train.microbatches", "1"
    judged = _json(capsys, *TINY_SPARSE, *divided, "--html", str(html))
    assert judged["breakdown"]["ep communication"] > 0
    assert "edp × ep × etp" in html.read_text()


def test_a_search_of_a_dense_model_says_nothing_of_experts(capsys: pytest.CaptureFixture[str]) -> None:
    head, *_ = _printed(capsys, *SMALL, "--ranks", "1", "--most", "1").splitlines()
    assert not {"ep", "etp"} & {*head.split()}


@pytest.mark.full
def test_a_search_offloads_as_configured(capsys: pytest.CaptureFixture[str]) -> None:
    found = _json(capsys, *SMALL, "--ranks", "2", "--parallel.offload", "full", "--most", "1")
    assert [one["plan"]["strategy"] for one in found["best"]] != ["none"]


def test_failures_give_an_interval_of_checkpoints(capsys: pytest.CaptureFixture[str]) -> None:
    given = [*SMALL, "--ranks", "2", "--mtbf", "1000"]
    assert "of the time is progress" in _printed(capsys, *given).splitlines()[-1]
    found = _json(capsys, *given, "--restart", "0")["goodput"]
    assert found["interval"] == pytest.approx((2 * 30 * 1000 * 3600 / 2) ** 0.5, rel=0.01)
    assert 0.99 < found["expected"] < 1
