"""The options of `plait checkpoint`."""

from __future__ import annotations

import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import NoReturn

from plait.errors import ConfigError

ABOUT = """\
usage: plait checkpoint ACTION [options]

actions:
  inspect  what is in a checkpoint, and whether all of it is there
  convert  into one of a single file, of files of a size, or of another layout's ranks
  export   into a folder of Hugging Face, or of torch.distributed.checkpoint
  import   from such a folder

`plait checkpoint ACTION --help` lists an action's options. All run in one process."""
FORMATS = ("huggingface", "dcp")
DTYPES = ("float64", "float32", "float16", "bfloat16")
_OF_HUGGINGFACE = ("file_size", "dtype", "heads", "context", "rope_base")
_ABOUT = {
    "inspect": "Says what is in a checkpoint, and whether all of it is there.\n\nexit code: 0 complete, "
    "1 damaged, 2 no checkpoint",
    "convert": "Writes a checkpoint anew: every tensor whole, in one file or in files of a size.\n\n"
    "Or, with options of `plait train` (--config FILE.toml, --parallel.tp 2, …), as the ranks of that run\n"
    "would. What these do not say of model and training is as in the checkpoint, but no degree or strategy.",
    "export": "Writes a checkpoint as a folder that transformers, or torch.distributed.checkpoint, loads.",
    "import": "Writes such a folder as a checkpoint. Of Hugging Face: GPT-2 and Llama.",
}
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_UNTOLD = "where the checkpoint does not say it"
_PATH = "a checkpoint, or a folder of them: then the newest"
_TARGET = "a folder, which must not be there"


def read(argv: Sequence[str]) -> Namespace:
    """The options; `action` names what is to be done. A ConfigError says what is not understood."""
    made = parsers()
    if argv[0] not in made:
        raise ConfigError(
            f'"{argv[0]}" is not an action: give {", ".join(made)}; see `plait checkpoint --help`.'
        )
    words, of_run = _told_apart(argv[1:]) if argv[0] == "convert" else (argv[1:], [])
    options = made[argv[0]].parse_args(words)
    options.action, options.of_run = argv[0], of_run
    if of_run and options.file_size is not None:
        raise ConfigError("--file-size goes with whole tensors: leave it out, or the options of a run.")
    if getattr(options, "format", None) == "dcp":
        idle = [name for name in _OF_HUGGINGFACE if getattr(options, name, None) is not None]
        if idle:
            told = idle[0].replace("_", "-")
            raise ConfigError(f"--{told} goes with --format huggingface: leave it out.")
    elif argv[0] == "import" and options.model is not None:
        raise ConfigError("--model goes with --format dcp: leave it out.")
    return options


def parsers() -> Mapping[str, ArgumentParser]:
    """Of each action."""
    made = {
        action: _Parser(
            f"plait checkpoint {action}",
            description=about,
            formatter_class=RawDescriptionHelpFormatter,
            allow_abbrev=False,
            add_help=False,
        )
        for action, about in _ABOUT.items()
    }
    for action, parser in made.items():
        source = "a folder in that format" if action == "import" else _PATH
        parser.add_argument(
            "path", metavar="SOURCE" if action == "import" else "PATH", type=Path, help=source
        )
        if action != "inspect":
            parser.add_argument("target", metavar="TARGET", type=Path, help=_TARGET)
        if action in ("export", "import"):
            parser.add_argument("--format", choices=FORMATS, required=True, help="of the folder")
            kinds = "float64, float32, float16 or bfloat16 (default: as they are)"
            names = "dcp: the model whose names transformers has there, llama or the FOLDER of one"
            if action == "export":
                names = f"the FOLDER of the model of Hugging Face that was trained, {_UNTOLD}; {names}"
            parser.add_argument("--model", metavar="MODEL", help=names)
            parser.add_argument("--dtype", choices=DTYPES, help=f"of parameters: {kinds}", metavar="DTYPE")
        if action != "inspect":
            size = "most that a file may have, such as 5GB (default: one file for all)"
            parser.add_argument("--file-size", metavar="BYTES", type=_bytes, help=size)
    add = made["inspect"].add_argument
    add("--check", action="store_true", help="read every byte, and compare it with what was written")
    add("--json", action="store_true", help="print one object with all of it")
    add = made["export"].add_argument
    add("--heads", metavar="N", type=_count, help=f"attention heads, {_UNTOLD}")
    add("--context", metavar="N", type=_count, help=f"tokens in a sequence, {_UNTOLD} (llama)")
    add("--rope-base", metavar="X", type=_positive, help="of rotary embedding, likewise (default: 10000)")
    return made


def _told_apart(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own words, and the options of a run: `--config FILE`, `--section.field value`."""
    own: list[str] = []
    of_run: list[str] = []
    words = iter(argv)
    for word in words:
        if not re.match(r"--(config\b|\w+\.)", word):
            own.append(word)
            continue
        of_run.append(word)
        if "=" not in word:
            of_run += islice(words, 1)
    return own, of_run


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `{self.prog} --help`.")


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)\s*([KMG]?I?B?)", text.strip().upper())
    if found is None or found[2] not in _UNITS or not int(found[1]):
        raise ArgumentTypeError(f"{text!r} is no size: give bytes, or such as 500MB or 5GB")
    return int(found[1]) * _UNITS[found[2]]


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is no count: give a whole number of at least 1")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (isfinite(value) and value > 0):
        raise ArgumentTypeError(f"{text!r} is no number above 0")
    return value
