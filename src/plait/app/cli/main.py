"""The entry point `plait`: run the command that the first argument names, print errors, return an exit code.

A command is imported only when it runs, so that those without tensors start without torch.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from io import TextIOWrapper
from types import ModuleType

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
COMMANDS = {
    "train": "train a model over pipeline, tensor and data parallel ranks",
    "evaluate": "loss, perplexity and accuracy of a checkpoint, on any data",
    "verify": "compare a run with one rank, and locate differences",
    "plan": "predict a step, or search the fastest plan, without GPUs",
    "schedule": "draw a pipeline schedule: time, bubble and memory",
    "report": "write the page of a run: charts, timeline, plan, warnings",
    "data": "prepare a corpus for training, and inspect it",
    "checkpoint": "inspect, convert, export and import checkpoints",
    "doctor": "check this host: versions, devices, limits, network, two ranks",
    "completion": "print a script that completes commands in a shell",
}
"""The commands and what they do. In the module of a command `run(argv)` runs it and returns the exit code,
raising `PlaitError` for errors that the user can correct; `parser()` has its help."""


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
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, n=1)
        remedy = f"did you mean {near[0]}?" if near else "see `plait --help` for all commands."
        raise PlaitError(f'"{name}" is not a command: {remedy}')
    module = command_module(name)
    if asks_for_help(rest):
        print(help_text(module.parser(), rest).rstrip())
        return 0
    return int(module.run(rest))


def command_module(name: str) -> ModuleType:
    """Import and return the module of the command `name`."""
    return import_module(f"plait.app.cli.{name}")


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
    """Return the exit code of a command of which a rank failed; 1 of `verify` says that runs differ."""
    return 2 if arguments[:1] == ["verify"] else 1


def _help() -> str:
    commands = two_columns([*COMMANDS.items()])
    return (
        f"usage: plait COMMAND [options]\n\ncommands:\n{commands}\n\n"
        "`plait COMMAND --help` describes a command and its options; `plait --version`\nprints the version."
    )


def _print_error(message: str) -> None:
    """Print a message to stderr, with long words such as paths shortened."""
    short = _LONG_WORD.sub(lambda word: f"{word[0][:_MOST_SHOWN]}…", message)
    print(f"plait: {terminal_text(short)}", file=sys.stderr)
