"""`plait verify`: does a configuration's run compute what one rank computes?"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NoReturn

from plait.cli.ranks_and_signals import degrees, importing, local_ranks
from plait.errors import ConfigError
from plait.train.config_parser import config_from_arguments, nearest

_ABOUT = """\
usage: plait verify [--config FILE.toml] [--section.field value ...] [options]

Runs the first steps on one rank in plain PyTorch, then on the plan's ranks, and
compares what every layer gives, every gradient, and what the optimizer makes of
them. Says equal and how closely, or where the first difference is and what
probably caused it. The configuration is that of `plait train`: its --help lists
the fields.

exit code: 0 equal, 1 different, 2 could not run"""


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `plait verify --help`.")


def parser() -> ArgumentParser:
    """What `plait verify` takes besides the configuration."""
    made = _Parser(
        "plait verify",
        usage="",
        description=_ABOUT,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    add = made.add_argument
    modes = (
        "float64, native (precisions and loss scale as configured) or exact (whole numbers, equal bit by bit)"
    )
    add("--mode", choices=("float64", "native", "exact"), default="float64", help=modes)
    add("--steps", metavar="K", type=_count, help="of training (default 2; exact: 1)")
    add("--isolate", action="store_true", help="feed the reference's values downstream: a line a mistake")
    add("--all", action="store_true", help="every layout and schedule that the number of ranks allows")
    add("--ranks", metavar="N", type=_count, help="for --all (default: the plan's)")
    add("--json", action="store_true", help="print one object with all of it")
    return made


def run(argv: Sequence[str]) -> int:
    """Verify as `argv` asks. Returns 0 if equal, 1 if not, 2 if no plan of `--all` could be run.

    Raises `PlaitError` where the user has something to mend.
    """
    if "--help" in argv or "-h" in argv:
        print(parser().format_help().removeprefix("usage: \n\n"))
        return 0
    options, rest = parser().parse_known_args(argv)
    _require_sections(rest)
    if options.ranks is not None and not options.all:
        raise ConfigError("--ranks goes with --all: without it the ranks are those of the configuration.")
    config = config_from_arguments(rest)
    with importing():  # late, so that help and refusals need not wait for torch
        from plait.train.verify_spec import verification_case
        from plait.verification.verify import verify_all, verify_case

    plan, threads = config.plan(), config.run.threads
    ranks = plan.world if options.ranks is None else options.ranks
    needed_by = degrees(plan) if options.ranks is None else f"--ranks {ranks}"
    with local_ranks(ranks, needed_by) as speaks:
        case = verification_case(config, mode=options.mode, steps=options.steps, isolate=options.isolate)
        result = (
            verify_all(case, plan, ranks, threads=threads, report_progress=_count_up)
            if options.all
            else verify_case(case, plan, threads=threads)
        )
    if options.all:
        _on_terminal("")
    if speaks:
        print(json.dumps(result.as_json(), indent=2, allow_nan=False) if options.json else result)
    if not result.compared:
        return 2  # no plan could be run, so none is different
    return 0 if result else 1


def _require_sections(arguments: Sequence[str]) -> None:
    """ConfigError for an option that is none of this command's and names no section of the configuration."""
    own = list(vars(parser().parse_args([])))
    for argument in arguments:
        name = argument.removeprefix("--").partition("=")[0].replace("-", "_")
        if not argument.startswith("--") or "." in name or name == "config":
            continue
        near = next(iter(get_close_matches(name, own, n=1)), None) or nearest(name)
        remedy = f"did you mean --{near}?" if near else "see `plait verify --help`."
        raise ConfigError(f"--{name} is not an option of `plait verify`: {remedy}")


def _count_up(done: int, plans: int) -> None:
    _on_terminal(f"{done} of {plans} plans")


def _on_terminal(text: str) -> None:
    """Show `text` in place of what was shown before, where somebody may look at it."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is no count: give a whole number of at least 1")
    return int(text)
