"""`plait plan`: the fastest plans of a number of ranks, the prediction of one plan, and calibration."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from plait.app.cli.arguments import CommandParser, count, number
from plait.app.cli.plan_html import judged_page, search_page
from plait.app.cli.plan_output import (
    SEARCHED,
    bound_text,
    calibration_text,
    change_lines,
    config_text,
    goodput_json,
    goodput_lines,
    groups,
    notes,
    plan_json,
    plan_table,
    same_time,
    search_json,
)
from plait.app.config.config import Config, configured_decoder
from plait.app.config.config_parser import config_from_arguments
from plait.errors import ConfigError, terminal_text
from plait.estimate.prediction.predicted_model import DecoderModel, PredictedModel
from plait.estimate.prediction.prediction import Prediction, predict
from plait.estimate.search.plan_changes import best_changes
from plait.estimate.search.plan_search import search, search_frontier
from plait.estimate.time.goodput import Failures, Goodput, best_interval
from plait.estimate.time.hardware import hardware_names, load_hardware
from plait.pictures.quantities import memory_text
from plait.pictures.report.page import write_page
from plait.plan.plan import Plan

HOUR = 3600.0
_ABOUT = """\
Predicts a training step without ranks or GPUs. With --ranks: compares every
plan of that many ranks for the model and train.batch, and prints those that fit
the memory, fastest first. Without it: judges the plan of the configuration, and
names changes of one field that would help. The configuration is that of
`plait train`: its --help lists the fields. In a search the precisions are kept,
and parallel degrees, strategy, schedule, recomputation and micro-batches are
chosen. --calibrate measures the machine that it runs on instead."""
_BELONGS_TO = {"most": "ranks", "checkpoint": "mtbf", "restart": "mtbf", "seed": "mtbf"}
_EXAMPLES = (
    ("plait plan --ranks 64 --hardware h100-sxm --config FILE.toml", ""),
    ("plait plan --ranks 8 --hardware a100-80 --write best.toml", "for plait train"),
    ("plait plan --hardware h100-sxm --config best.toml", "one plan"),
    ("plait plan --ranks 8 --hardware h100-sxm --html plans.html", "a page to send"),
    ("plait plan --calibrate this.toml", "for --hardware"),
)


def parser() -> CommandParser:
    """Return the parser of the options of `plait plan`, without those of the configuration."""
    made = CommandParser(
        "plait plan",
        usage="plait plan --hardware NAME [--ranks N] [--section.field VALUE ...]",
        description=_ABOUT,
        examples=_EXAMPLES,
        takes_configuration=True,
    )
    add = made.add_argument
    names = ", ".join(hardware_names())
    add("--hardware", metavar="NAME", help=f"{names}, or a TOML file")
    add("--ranks", metavar="N", type=count, help="search the plans of N ranks")
    add("--most", metavar="K", type=count, default=10, help="plans that a search shows (default: 10)")
    add("--json", action="store_true", help="print one object with all of it")
    add("--html", metavar="FILE", type=Path, help="write a page: plans by time and memory, the timeline")
    add("--mtbf", metavar="HOURS", type=number, help="between failures of a device: goodput")
    add("--checkpoint", metavar="SECONDS", type=number, default=30, help="that a save takes (30)")
    add("--restart", metavar="SECONDS", type=number, default=300, help="after a failure (300)")
    add("--seed", metavar="N", type=count, default=1, help="of the simulated failures (1)")
    add("--calibrate", metavar="OUT", type=Path, help="measure this machine, and write its TOML file")
    add("--write", metavar="FILE", type=Path, help="write the fastest plan as a configuration")
    return made


def run(argv: Sequence[str]) -> int:
    """Search plans, predict one or measure this machine, as `argv` says, and return 0. Raises PlaitError."""
    made = parser()
    options, rest = made.parse_known_args(argv)
    made.require_together(options, _BELONGS_TO)
    if options.calibrate is not None:
        _calibrate(options, rest)
        return 0
    if options.hardware is None:
        names = ", ".join(hardware_names())
        raise ConfigError(f"--hardware is missing: give {names}, or a file that --calibrate has written.")
    if options.write is not None and options.ranks is None:
        raise ConfigError("--write goes with --ranks: without a search there is no plan to write.")
    if options.mtbf is not None and options.mtbf <= 0:
        raise ConfigError(f"--mtbf is {options.mtbf:g}: give hours above 0 between failures of a device.")
    # So that any train.batch and any offloading are accepted before the search chooses.
    searched = {"train": {"microbatches": 1}, "parallel": {"strategy": "full"}}
    defaults = searched if options.ranks is not None else {}
    config = config_from_arguments(rest, defaults)
    if options.ranks is None:
        _judge(config, options)
    else:
        _search(config, options, rest)
    return 0


def _calibrate(options: Namespace, rest: Sequence[str]) -> None:
    others = options.hardware, options.write, options.html, options.mtbf
    if rest or options.json or any(one is not None for one in others):
        raise ConfigError(
            "--calibrate goes with --ranks only: predict with the file that it writes afterwards."
        )
    from plait.estimate.measurement.calibrate import calibrate  # loads torch

    print(calibration_text(calibrate(options.calibrate, options.ranks)))
    print(f"wrote {options.calibrate}; use it: plait plan --hardware {options.calibrate}")


def _judge(config: Config, options: Namespace) -> None:
    plan = config.plan()
    rows = config.train.batch // plan.dp
    found = predict(_model(config), plan, options.hardware, rows=rows)
    changes, goodput = best_changes(found), _goodput(options, found)
    if options.html is not None:
        write_page(judged_page(config, found, changes, goodput), options.html, "--html")
    if options.json:
        print(json.dumps(plan_json(found, changes) | goodput_json(goodput)))
        return
    lines = [f"{found}\nbound by   {bound_text(found)}", "", *change_lines(changes, found.fits)]
    print(terminal_text("\n".join([*lines, *goodput_lines(goodput, found)])))
    _tell_written(options.html)


def _search(config: Config, options: Namespace, rest: Sequence[str]) -> None:
    chosen = [*(f"--parallel.{name}" for name in SEARCHED), "--train.microbatches"]
    given = {word.partition("=")[0] for word in rest}
    if both := next((name for name in chosen if name in given), None):
        raise ConfigError(f"{both} does not go with --ranks, which chooses it: leave one of them out.")
    if config.parallel.memory_limit is not None:
        raise ConfigError("parallel.memory_limit does not go with --ranks: leave it out.")
    model, hardware = _model(config), load_hardware(options.hardware)
    kept = {name: value for name, value in vars(config.plan()).items() if name not in SEARCHED}
    base = Plan(**kept, strategy="none" if config.parallel.offload == "none" else "full")
    most = max(2, options.most)
    result = search(model, hardware, options.ranks, config.train.batch, base=base, most=most, alike=same_time)
    if not result.best:
        raise ConfigError(
            f"none of {result.plans:,} plans of {options.ranks} ranks fits the "
            f"{memory_text(hardware.memory)} of {hardware.name}: give more ranks, a smaller model.context, "
            "or a smaller model."
        )
    if options.write is not None:
        write_page(config_text(config, result.best[0].plan), options.write, "--write")
    goodput = _goodput(options, result.best[0])
    if options.html is not None:
        frontier = search_frontier(result, config.train.batch, base=base)
        write_page(search_page(config, result, frontier, options.most, goodput), options.html, "--html")
    if options.json:
        print(json.dumps(search_json(result, options.most) | goodput_json(goodput)))
        return
    print(plan_table(groups(result.best)[: options.most]))
    print(terminal_text("\n".join(["", *notes(result), *goodput_lines(goodput, result.best[0])])))
    _tell_written(options.write, options.html)


def _model(config: Config) -> PredictedModel:
    """Return the model that a configuration trains; imports torch only if sizes do not suffice."""
    decoder = configured_decoder(config)
    if decoder is not None:
        return DecoderModel(decoder)
    from plait.app.train.predicted_run import configured_model

    return configured_model(config)


def _tell_written(*files: Path | None) -> None:
    for file in filter(None, files):
        print(f"wrote {file}")


def _goodput(options: Namespace, found: Prediction) -> Goodput | None:
    """Return the best interval of saves of a predicted run, and its goodput; None without `--mtbf`."""
    if options.mtbf is None:
        return None
    mean = options.mtbf * HOUR / found.plan.world
    return best_interval(Failures(mean, options.checkpoint, options.restart), options.seed)
