"""The options of `plait checkpoint`."""

from __future__ import annotations

import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

from plait.cli.arguments import CommandParser, count, number
from plait.errors import ConfigError

ABOUT = """\
usage: plait checkpoint ACTION [options]

actions:
  inspect  list the contents of a checkpoint, and check that it is complete
  convert  write a checkpoint as one file, as files of a size, or for the ranks of another plan
  export   write a checkpoint in the format of Hugging Face or torch.distributed.checkpoint
  import   read a checkpoint in one of these formats

`plait checkpoint ACTION --help` lists an action's options. All run in one process."""
FORMATS = ("huggingface", "dcp")
DTYPES = ("float64", "float32", "float16", "bfloat16")
_OF_HUGGINGFACE = ("file_size", "dtype", "heads", "context", "rope_base")
_ABOUT = {
    "inspect": "Lists the contents of a checkpoint, and checks that it is complete.\n\n"
    "exit code: 0 complete, 1 damaged, 2 no checkpoint",
    "convert": "Writes a checkpoint with whole tensors, in one file or in files of a size.\n\n"
    "Or, with options of `plait train` (--config FILE.toml, --parallel.tp 2, …),\n"
    "with the shards of such a run. Fields of model and training that are not given\n"
    "come from the checkpoint; degrees and strategy do not.",
    "export": "Writes a checkpoint as a folder that transformers or torch.distributed.checkpoint loads.",
    "import": "Writes a checkpoint from a folder of Hugging Face (GPT-2, Llama) or of torch's DCP.",
}
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_IF_MISSING = "if the checkpoint does not record it"
_PATH = "a checkpoint, or a folder of checkpoints, for its newest"
_TARGET = "a folder, which must not exist"


def read(argv: Sequence[str]) -> Namespace:
    """Parse the arguments of `plait checkpoint`; `.action` is the action's name. Raises ConfigError."""
    made = parsers()
    if argv[0] not in made:
        raise ConfigError(
            f'"{argv[0]}" is not an action: give {", ".join(made)}; see `plait checkpoint --help`.'
        )
    own, of_run = _split_options(argv[1:]) if argv[0] == "convert" else (argv[1:], [])
    options = made[argv[0]].parse_args(own)
    options.action, options.of_run = argv[0], of_run
    if of_run and options.file_size is not None:
        raise ConfigError("--file-size goes with whole tensors: leave it out, or the options of a run.")
    if getattr(options, "format", None) == "dcp":
        unused = [name for name in _OF_HUGGINGFACE if getattr(options, name, None) is not None]
        if unused:
            option = unused[0].replace("_", "-")
            raise ConfigError(f"--{option} goes with --format huggingface: leave it out.")
    elif argv[0] == "import" and options.model is not None:
        raise ConfigError("--model goes with --format dcp: leave it out.")
    return options


def parsers() -> Mapping[str, ArgumentParser]:
    """Return the argument parser of each action of `plait checkpoint`: inspect, convert, export, import."""
    made = {action: CommandParser(f"checkpoint {action}", about) for action, about in _ABOUT.items()}
    for action, parser in made.items():
        source = "a folder in the given format" if action == "import" else _PATH
        parser.add_argument(
            "path", metavar="SOURCE" if action == "import" else "PATH", type=Path, help=source
        )
        if action != "inspect":
            parser.add_argument("target", metavar="TARGET", type=Path, help=_TARGET)
        if action in ("export", "import"):
            parser.add_argument("--format", choices=FORMATS, required=True, help="format of the folder")
            kinds = "float64, float32, float16 or bfloat16 (default: unchanged)"
            names = "dcp: use the parameter names of transformers, for llama or the model in a FOLDER"
            if action == "export":
                names = f"FOLDER of the Hugging Face model that was trained, {_IF_MISSING}; {names}"
            parser.add_argument("--model", metavar="MODEL", help=names)
            parser.add_argument(
                "--dtype", choices=DTYPES, help=f"dtype of parameters: {kinds}", metavar="DTYPE"
            )
        if action != "inspect":
            size = "largest size of a file, such as 5GB (default: a single file)"
            parser.add_argument("--file-size", metavar="BYTES", type=_bytes, help=size)
    add = made["inspect"].add_argument
    add("--check", action="store_true", help="read every byte, and compare checksums")
    add("--json", action="store_true", help="print one JSON object")
    add = made["export"].add_argument
    add("--heads", metavar="N", type=count, help=f"number of attention heads, {_IF_MISSING}")
    add(
        "--context",
        metavar="N",
        type=count,
        help=f"largest number of tokens in a sequence, {_IF_MISSING} (llama)",
    )
    add(
        "--rope-base",
        metavar="X",
        type=_positive,
        help=f"base of the rotary embedding, {_IF_MISSING} (default: 10000)",
    )
    return made


def _split_options(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the command's own arguments, and the options of a run, such as `--config FILE`."""
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


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)\s*([KMG]?I?B?)", text.strip().upper())
    if found is None or found[2] not in _UNITS or not int(found[1]):
        raise ArgumentTypeError(f"{text!r} is not a size: give bytes, or such as 500MB or 5GB")
    return int(found[1]) * _UNITS[found[2]]


def _positive(text: str) -> float:
    value = number(text)
    if value <= 0:
        raise ArgumentTypeError(f"{text!r} is not above 0")
    return value
