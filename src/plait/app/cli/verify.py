"""`plait verify`: compare a configuration's run with one rank."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

from plait.app.cli.arguments import CommandParser, count
from plait.app.cli.ranks_and_signals import degrees, importing, local_ranks
from plait.app.config.config_parser import config_from_arguments, nearest_field
from plait.errors import ConfigError, terminal_text

if TYPE_CHECKING:
    from plait.verification.independent_model_report import IndependentReport
    from plait.verification.report import VerificationReport
    from plait.verification.sweep import Sweep

_ABOUT = """\
Runs the first steps on one rank in plain PyTorch, then on the plan's ranks, and
compares the output of every layer, every gradient, and every parameter after
the optimizer's step. Prints equal and how closely, or the place of the first
difference and its probable cause. The configuration is that of `plait train`:
its --help lists the fields.

exit code: 0 equal, 1 different, 2 could not run"""
_EXAMPLES = (
    ("plait verify --config examples/demo.toml", "the plan of a file"),
    ("plait verify --parallel.tp 2 --mode exact", "bit by bit"),
    ("plait verify --all --ranks 4", "every plan of four ranks"),
    ("plait verify --model.name DIR --against transformers", ""),
)


def parser() -> CommandParser:
    """Return the parser of the options of `plait verify`, without those of the configuration."""
    made = CommandParser(
        "plait verify",
        usage="plait verify [--config FILE.toml] [--section.field VALUE ...] [options]",
        description=_ABOUT,
        examples=_EXAMPLES,
        takes_configuration=True,
    )
    add = made.add_argument
    modes = (
        "float64, native (precisions and loss scale as configured) or exact (whole numbers, equal bit by bit)"
    )
    add("--mode", choices=("float64", "native", "exact"), default="float64", help=modes)
    add("--steps", metavar="K", type=count, help="of training (default 2; exact: 1)")
    add("--isolate", action="store_true", help="feed the reference's values downstream: a line a mistake")
    add("--all", action="store_true", help="every layout and schedule that the number of ranks allows")
    add("--ranks", metavar="N", type=count, help="for --all (default: the plan's)")
    add("--against", choices=("transformers",), help="compare with that library's model, not plait's layers")
    add("--json", action="store_true", help="print one object with all of it")
    return made


def run(argv: Sequence[str]) -> int:
    """Compare the run in `argv` with one rank. Return 0 if equal, 1 if not, 2 if `--all` ran no plan."""
    options, rest = parser().parse_known_args(argv)
    _require_sections(rest)
    if options.ranks is not None and not options.all:
        raise ConfigError("--ranks goes with --all: without it the ranks are those of the configuration.")
    _require_goes_with_against(options)
    config = config_from_arguments(rest)
    with importing():  # late, so that help and errors do not wait for torch
        from plait.app.train.data_sources import with_context_of_data
        from plait.app.train.run_data import check_data
        from plait.app.train.verification_case import transformers_reference, verification_case
        from plait.verification.verify import verify_all, verify_case

    plan, threads = config.plan(), config.run.threads
    ranks = plan.world if options.ranks is None else options.ranks
    subject = degrees(plan) if options.ranks is None else f"--ranks {ranks}"
    with local_ranks(ranks, subject) as prints:
        config, _ = with_context_of_data(config, rest)
        check_data(config)
        case = verification_case(config, mode=options.mode, steps=options.steps, isolate=options.isolate)
        result: VerificationReport | Sweep | IndependentReport
        if options.all:
            result = verify_all(case, plan, ranks, threads=threads, report_progress=_show_progress)
        else:
            reference = transformers_reference(config) if options.against is not None else None
            result = verify_case(case, plan, reference, threads=threads)
    if options.all:
        _replace_line("")
    if prints and options.json:
        print(json.dumps(result.as_json(), indent=2, allow_nan=False))
    elif prints:
        print(terminal_text(str(result)))
    if not result.compared:
        return 2  # no plan could be run, so none is different
    return 0 if result else 1


def _require_goes_with_against(options: Namespace) -> None:
    """Raise ConfigError for an option that a comparison with another library's model does not use."""
    usual = {"all": False, "isolate": False, "mode": "float64"}
    for name, value in usual.items():
        if options.against is not None and getattr(options, name) != value:
            raise ConfigError(
                f"--{name} does not go with --against, which compares one plan in float64: leave it out."
            )


def _require_sections(arguments: Sequence[str]) -> None:
    """Raise ConfigError for the first option that is neither `--config` nor of form `--section.field`."""
    own = list(vars(parser().parse_args([])))
    for argument in arguments:
        name = argument.removeprefix("--").partition("=")[0].replace("-", "_")
        if not argument.startswith("--") or "." in name or name == "config":
            continue
        near = next(iter(get_close_matches(name, own, n=1)), None) or nearest_field(name)
        remedy = f"did you mean --{near}?" if near else "see `plait verify --help`."
        raise ConfigError(f"--{name} is not an option of `plait verify`: {remedy}")


def _show_progress(done: int, plans: int) -> None:
    _replace_line(f"{done} of {plans} plans")


def _replace_line(text: str) -> None:
    """Replace the progress line by `text`, where stderr is a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
