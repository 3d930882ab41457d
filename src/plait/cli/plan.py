"""`plait plan`: the fastest plans of a number of ranks by prediction, or the prediction of a given plan."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plait.cli.arguments import CommandParser, count
from plait.errors import ConfigError
from plait.plan import Plan
from plait.prediction.hardware import hardware_names, load_hardware
from plait.prediction.plan_search import PlanSearchResult, search
from plait.prediction.step_prediction import Prediction, predict
from plait.train.config import Config
from plait.train.config_parser import config_from_arguments
from plait.train.planned_config import SEARCHED, config_text, configured_decoder

_ABOUT = """\
Predicts a training step without ranks or GPUs. With --ranks: compares every
plan of that many ranks for the model and train.batch, and prints those that fit
the memory, fastest first. Without it: judges the plan of the configuration. The
configuration is that of `plait train`: its --help lists the fields. In a search
the precisions are kept, and parallel degrees, strategy, schedule, recomputation
and micro-batches are chosen."""
_EXAMPLES = (
    ("plait plan --ranks 64 --hardware h100-sxm --config FILE.toml", ""),
    ("plait plan --ranks 8 --hardware a100-80 --write best.toml", "for plait train"),
    ("plait plan --hardware h100-sxm --config best.toml", "one plan"),
)
_HEAD = (
    "step",
    "tokens/s",
    "MFU",
    "memory",
    "pp",
    "tp",
    "cp",
    "dp",
    "copies",
    "micro",
    "options",
    "bound by",
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
    add("--hardware", metavar="NAME", required=True, help=f"{names}, or a TOML file")
    add("--ranks", metavar="N", type=count, help="search the plans of N ranks")
    add("--most", metavar="K", type=count, default=10, help="plans that a search shows (default: 10)")
    add("--json", action="store_true", help="print one object with all of it")
    add("--write", metavar="FILE", type=Path, help="write the fastest plan as a configuration")
    return made


def run(argv: Sequence[str]) -> int:
    """Run `plait plan`, and return 0. Raises `PlaitError` for errors that the user can correct."""
    options, rest = parser().parse_known_args(argv)
    if options.write is not None and options.ranks is None:
        raise ConfigError("--write goes with --ranks: without a search there is no plan to write.")
    # One micro-batch, so that any train.batch is accepted before the search divides it.
    defaults = {"train": {"microbatches": 1}} if options.ranks is not None else {}
    config = config_from_arguments(rest, defaults)
    if config.parallel.offload != "none":
        raise ConfigError(
            f"parallel.offload is {config.parallel.offload}, which predictions do not know: set it to none."
        )
    if options.ranks is None:
        _judge(config, options)
    else:
        _search(config, options)
    return 0


def _judge(config: Config, options: Namespace) -> None:
    plan = config.plan()
    rows = config.train.batch // plan.dp
    found = predict(configured_decoder(config), plan, options.hardware, rows=rows)
    if options.json:
        print(json.dumps(_as_json(found) | {"breakdown": dict(found.breakdown)}))
    else:
        print(f"{found}\nbound by   {_bound(found)}")


def _search(config: Config, options: Namespace) -> None:
    if config.parallel.memory_limit is not None:
        raise ConfigError("parallel.memory_limit does not go with --ranks: leave it out.")
    model, hardware = configured_decoder(config), load_hardware(options.hardware)
    kept = {name: value for name, value in vars(config.plan()).items() if name not in SEARCHED}
    result = search(
        model, hardware, options.ranks, config.train.batch, base=Plan(**kept), most=max(2, options.most)
    )
    if not result.best:
        raise ConfigError(
            f"none of {result.plans:,} plans of {options.ranks} ranks fits the {hardware.memory / 2**30:.1f} "
            f"GiB of {hardware.name}: give more ranks, a smaller model.context, or a smaller model."
        )
    if options.write is not None:
        options.write.write_text(config_text(config, result.best[0].plan), encoding="utf-8")
    if options.json:
        print(json.dumps(_search_json(result, options.most)))
        return
    print(_table(result.best[: options.most]))
    print("\n".join(["", *_notes(result)]))
    if options.write is not None:
        print(f"wrote {options.write}")


def _table(found: Sequence[Prediction]) -> str:
    """Return a line for each plan, fastest first, below the names of the columns."""
    rows = [_HEAD, *map(_row, found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    numbers = _HEAD.index("options")
    lines = []
    for row in rows:
        padded = [*map(str.rjust, row[:numbers], widths), *map(str.ljust, row[numbers:], widths[numbers:])]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def _row(found: Prediction) -> tuple[str, ...]:
    plan = found.plan
    words = [plan.strategy if plan.reduce == "last" else f"{plan.strategy} ({plan.reduce})"]
    if plan.pp > 1:
        words.append(plan.schedule if plan.chunks == 1 else f"{plan.schedule} × {plan.chunks}")
    words += [f"recompute {plan.recompute}"] if plan.recompute != "none" else []
    words += [f"sequence {plan.sequence_parallel}"] if plan.cuts_sequence else []
    return (
        f"{found.step_seconds:.4g} s",
        f"{found.tokens_per_second:,.0f}",
        f"{found.mfu:.1%}",
        f"{found.peak_memory / 2**30:.1f} GiB",
        *(str(degree) for degree in (plan.pp, plan.tp, plan.cp, plan.dp)),
        str(plan.replicate),
        str(plan.microbatches),
        ", ".join(words),
        _bound(found),
    )


def _bound(found: Prediction) -> str:
    return f"{found.bound}, {found.breakdown[found.bound] / found.step_seconds:.0%} of the step"


def _notes(result: PlanSearchResult) -> list[str]:
    """Return lines on what became of the other plans, and on the distance of the second from the first."""
    lines = [
        f"{result.plans:,} plans: {result.predicted:,} fit and were simulated, {result.too_large:,} need "
        f"more memory, {result.slower:,} cannot be faster than those found."
    ]
    for reason, divisions in result.impossible.items():
        lines.append(f"{divisions:,} divisions of the ranks are impossible: {reason}.")
    if len(result.best) > 1:
        lines.append(f"The second is {_behind(result):.2%} slower than the first.")
    return lines


def _behind(result: PlanSearchResult) -> float:
    return result.best[1].step_seconds / result.best[0].step_seconds - 1


def _search_json(result: PlanSearchResult, most: int) -> dict[str, Any]:
    return {
        "plans": result.plans,
        "predicted": result.predicted,
        "too_large": result.too_large,
        "slower": result.slower,
        "impossible_divisions": dict(result.impossible),
        "second_behind": _behind(result) if len(result.best) > 1 else None,
        "best": [_as_json(found) for found in result.best[:most]],
    }


def _as_json(found: Prediction) -> dict[str, Any]:
    return {
        "plan": {name: getattr(found.plan, name) for name in (*SEARCHED, "microbatches")},
        "layers_per_stage": found.layers_per_stage,
        "step_seconds": found.step_seconds,
        "tokens_per_second": found.tokens_per_second,
        "mfu": found.mfu,
        "hfu": found.hfu,
        "peak_memory": found.peak_memory,
        "fits": found.fits,
        "bound": found.bound,
    }
