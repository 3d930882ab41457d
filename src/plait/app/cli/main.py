"""The entry point `plait`: run the command that the first argument names, print errors, return an exit code.

A command is imported only when it runs, so that those without tensors start without torch.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from io import TextIOWrapper

from plait.app.cli.arguments import asks_for_help, help_text, two_columns
from plait.app.cli.ranks_and_signals import end_rank
from plait.errors import CommunicationError, PlaitError, RankError, terminal_text
from plait.package import VERSION

_NO_MEMORY = re.compile(
    r"can't allocate memory|not enough memory|out of memory|Unable to allocate|^MemoryError", re.MULTILINE
)
"""Messages of torch and NumPy when an allocation fails."""
_LONG_WORD = re.compile(r"\S{200,}")
_MOST_SHOWN = 80
"""Characters of a long word, such as a path, that are printed."""


@dataclass(frozen=True)
class Command:
    """A command of `plait`, and its module.

    `run(argv)` of the module runs it and returns the exit code; `parser()` has its help.
    """

    name: str
    module: str
    summary: str
    failed: int = 1
    """The exit code when a rank failed."""


COMMANDS = (
    Command("train", "plait.app.cli.train", "train a model over pipeline, tensor and data parallel ranks"),
    Command(
        "evaluate", "plait.app.cli.evaluate", "loss, perplexity and accuracy of a checkpoint, on any data"
    ),
    Command(
        "verify", "plait.app.cli.verify", "compare a run with one rank, and locate differences", failed=2
    ),
    Command("plan", "plait.app.cli.plan", "predict a step, or search the fastest plan, without GPUs"),
    Command("schedule", "plait.app.cli.schedule", "draw a pipeline schedule: time, bubble and memory"),
    Command("report", "plait.app.cli.report", "write the page of a run: charts, timeline, plan, warnings"),
    Command("data", "plait.app.cli.data", "prepare a corpus for training, and inspect it"),
    Command("checkpoint", "plait.app.cli.checkpoint", "inspect, convert, export and import checkpoints"),
    Command(
        "doctor", "plait.app.cli.doctor", "check this host: versions, devices, limits, network, two ranks"
    ),
    Command("completion", "plait.app.cli.completion", "print a script that completes commands in a shell"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (default: `sys.argv`) names and return the exit code.

    0: done. 1: a rank failed or lost a peer (for `verify` 2). 2: an error that the user can correct. 130:
    interrupted. 141: the reader of the output has closed it.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # texts and names of files may hold any character
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader has closed the pipe, as `head` does; Python would print another error at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except RankError as error:
        if _ran_out_of_memory(error):
            return 2
        complete = error.traceback in str(error)
        _print_error(str(error).rstrip() if complete else f"{error}\n\n{error.traceback.rstrip()}")
        return _failure_code(arguments)
    except CommunicationError as error:
        # The user cannot correct a lost peer; the failure of another rank is its cause.
        if isinstance(error.__cause__, RankError) and _ran_out_of_memory(error.__cause__):
            return 2
        _print_error(str(error.__cause__ if isinstance(error.__cause__, RankError) else error).rstrip())
        code = _failure_code(arguments)
        if argv is None:
            end_rank(code)
        return code
    except PlaitError as error:
        _print_error(str(error))
        return 2
    except OSError as error:
        if error.filename is None:
            raise
        _print_error(f"{error.filename} cannot be used ({error.strerror}): give another path.")
        return 2
    except KeyboardInterrupt:
        _print_error("interrupted.")
        return 130


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help(), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    name, *rest = arguments
    if name == "--version":
        print(f"plait {VERSION}")
        return 0
    for command in COMMANDS:
        if command.name == name:
            module = import_module(command.module)
            if asks_for_help(rest):
                print(help_text(module.parser(), rest).rstrip())
                return 0
            return int(module.run(rest))
    near = get_close_matches(name, [command.name for command in COMMANDS], n=1)
    remedy = f"did you mean {near[0]}?" if near else "see `plait --help` for all commands."
    raise PlaitError(f'"{name}" is not a command: {remedy}')


def _ran_out_of_memory(error: RankError) -> bool:
    """Return whether a rank failed for lack of memory; if so, print one sentence about it."""
    if not _NO_MEMORY.search(error.traceback):
        return False
    size = re.search(r"allocate ([\d.]+ ?\w+)", error.traceback)
    wanted = f" for {size[1]}" if size else ""
    _print_error(
        f"rank {error.rank} is out of memory{wanted}: make the model, train.batch or model.context smaller, "
        "take more train.microbatches, or spread it by parallel.strategy, parallel.tp or parallel.pp."
    )
    return True


def _failure_code(arguments: Sequence[str]) -> int:
    return next((command.failed for command in COMMANDS if command.name in arguments[:1]), 1)


def _help() -> str:
    commands = two_columns([(command.name, command.summary) for command in COMMANDS])
    return (
        f"usage: plait COMMAND [options]\n\ncommands:\n{commands}\n\n"
        "`plait COMMAND --help` describes a command and its options; `plait --version`\nprints the version."
    )


def _print_error(message: str) -> None:
    """Print a message to stderr, with long words such as paths shortened."""
    short = _LONG_WORD.sub(lambda word: f"{word[0][:_MOST_SHOWN]}…", message)
    print(f"plait: {terminal_text(short)}", file=sys.stderr)
