"""`plait`: finds the command, runs it, and turns what went wrong into a sentence and an exit code.

Commands are imported only when they run, so that those without tensors start without torch.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module, metadata

from plait.cli.ranks_and_signals import end_rank
from plait.errors import CommunicationError, PlaitError, RankError

_NO_MEMORY = re.compile(
    r"can't allocate memory|not enough memory|out of memory|Unable to allocate|^MemoryError", re.MULTILINE
)
"""What torch and NumPy say where there is none."""
_LONG_WORD = re.compile(r"\S{200,}")
_MOST_TOLD = 80
"""Characters of a path in a sentence."""


@dataclass(frozen=True)
class Command:
    """A command: the module whose `run(argv) -> exit code` does it, and what it is for."""

    name: str
    module: str
    summary: str
    failed: int = 1
    """The exit code when a rank failed."""


COMMANDS = (
    Command("train", "plait.cli.train", "train a model over pipeline, tensor and data parallel ranks"),
    Command("verify", "plait.cli.verify", "compare a run with one rank: equal, or where not", failed=2),
    Command("schedule", "plait.cli.schedule", "draw a pipeline schedule: time, bubble and memory"),
    Command("checkpoint", "plait.cli.checkpoint", "look into checkpoints, convert, export and import them"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (default: `sys.argv`) names and return the exit code.

    0: done. 1: a rank failed or lost a peer (for `verify` 2); what is known is shown. 2: something the user
    can mend. 130: interrupted. 141: nobody reads the output any more.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Whoever read has heard enough, as `head` does; Python would complain again at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except RankError as error:
        if _ran_out_of_memory(error):
            return 2
        told = error.traceback in str(error)
        _complain(str(error).rstrip() if told else f"{error}\n\n{error.traceback.rstrip()}")
        return _code_of_failure(arguments)
    except CommunicationError as error:
        # A lost peer is not for the user to mend; what the other ranks did helps to find it.
        if isinstance(error.__cause__, RankError) and _ran_out_of_memory(error.__cause__):
            return 2
        _complain(str(error.__cause__ if isinstance(error.__cause__, RankError) else error).rstrip())
        code = _code_of_failure(arguments)
        if argv is None:
            end_rank(code)
        return code
    except PlaitError as error:
        _complain(str(error))
        return 2
    except OSError as error:
        if error.filename is None:
            raise
        _complain(f"{error.filename} cannot be used ({error.strerror}): give another path.")
        return 2
    except KeyboardInterrupt:
        _complain("interrupted.")
        return 130


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help(), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    name, *rest = arguments
    if name == "--version":
        print(f"plait {metadata.version('plait')}")
        return 0
    for command in COMMANDS:
        if command.name == name:
            return int(import_module(command.module).run(rest))
    near = get_close_matches(name, [command.name for command in COMMANDS], n=1)
    remedy = f"did you mean {near[0]}?" if near else "see `plait --help` for all commands."
    raise PlaitError(f'"{name}" is not a command: {remedy}')


def _ran_out_of_memory(error: RankError) -> bool:
    """Whether that is why a rank failed; if so, it is told in one sentence."""
    if not _NO_MEMORY.search(error.traceback):
        return False
    size = re.search(r"allocate ([\d.]+ ?\w+)", error.traceback)
    wanted = f" for {size[1]}" if size else ""
    _complain(
        f"rank {error.rank} has no memory{wanted}: make the model, train.batch or model.context smaller, "
        "take more train.microbatches, or spread it by parallel.strategy, parallel.tp or parallel.pp."
    )
    return True


def _code_of_failure(arguments: Sequence[str]) -> int:
    return next((command.failed for command in COMMANDS if command.name in arguments[:1]), 1)


def _help() -> str:
    width = max(len(command.name) for command in COMMANDS)
    commands = "\n".join(f"  {command.name:<{width}}  {command.summary}" for command in COMMANDS)
    return (
        f"usage: plait COMMAND [options]\n\ncommands:\n{commands}\n\n"
        "`plait COMMAND --help` lists a command's options; `plait --version` prints the version."
    )


def _complain(message: str) -> None:
    """Print a message, of whose words none is longer than a line or two: paths may be."""
    short = _LONG_WORD.sub(lambda word: f"{word[0][:_MOST_TOLD]}…", message)
    print(f"plait: {short}", file=sys.stderr)
