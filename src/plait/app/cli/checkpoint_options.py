"""Options of `plait checkpoint`: inspect, convert, export, import."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from plait.app.cli.arguments import CommandParser, count, number
from plait.errors import ConfigError

_ABOUT = "Inspects and converts checkpoints, in one process without ranks."
_ACTIONS = {
    "inspect": "list the contents of a checkpoint, and check that it is complete",
    "convert": "write it as one file, files of a size, or for another plan",
    "export": "write it in the format of Hugging Face, peft or torch (DCP)",
    "import": "read a checkpoint in one of these formats",
}
_ABOUT_ACTION = {
    "inspect": "Lists the contents of a checkpoint, and checks that it is complete.\n\n"
    "exit code: 0 complete, 1 damaged, 2 no checkpoint",
    "convert": "Writes a checkpoint with whole tensors, in one file or in files of a size.\n\n"
    "Or, with options of `plait train` (--config FILE.toml, --parallel.tp 2, …),\n"
    "with the shards of such a run. Fields of model and training that are not given\n"
    "come from the checkpoint; degrees and strategy do not.",
    "export": "Writes a checkpoint as a folder that transformers, peft (the adapters of LoRA\n"
    "only) or torch.distributed.checkpoint loads. For transformers, adapters are\n"
    "merged.",
    "import": "Writes a checkpoint from a folder of Hugging Face (GPT-2, Llama) or of torch's DCP.",
}
_EXAMPLES = {
    "inspect": (("plait checkpoint inspect runs/demo/checkpoints", "the newest one"),),
    "convert": (
        ("plait checkpoint convert runs/demo/checkpoints whole", "one file"),
        ("plait checkpoint convert runs/demo/checkpoints four --parallel.tp 4", "4 ranks"),
    ),
    "export": (("plait checkpoint export runs/demo/checkpoints model --format huggingface", ""),),
    "import": (("plait checkpoint import model checkpoint --format huggingface", ""),),
}
_FORMATS = ("huggingface", "dcp")
_DTYPES = ("float64", "float32", "float16", "bfloat16")
_OF_HUGGINGFACE = ("file_size", "dtype", "heads", "context", "rope_base")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_IF_MISSING = "if the checkpoint does not record it"
_PATH = "a checkpoint; a folder of checkpoints, for its newest; or FOLDER/best, of the lowest validation loss"
_TARGET = "a folder, which must not exist"


def read_options(argv: Sequence[str]) -> Namespace:
    """Return the options in `argv`; `.action` is the action's name, `.of_run` the options of a run.

    Raises ConfigError for options that do not go together, too.
    """
    own, of_run = split_options(argv) if "convert" in argv[:1] else (argv, [])
    options = parser().parse_args(own)
    options.of_run = of_run
    if of_run and options.file_size is not None:
        raise ConfigError("--file-size goes with whole tensors: leave it out, or the options of a run.")
    form = getattr(options, "format", None)
    if form in ("dcp", "peft"):
        unused = [name for name in _OF_HUGGINGFACE if getattr(options, name, None) is not None]
        if unused:
            option = unused[0].replace("_", "-")
            raise ConfigError(f"--{option} goes with --format huggingface: leave it out.")
    elif options.action == "import" and options.model is not None:
        raise ConfigError("--model goes with --format dcp: leave it out.")
    return options


def parser() -> CommandParser:
    """Return the parser of the actions of `plait checkpoint`, without the options of a run."""
    made = CommandParser("plait checkpoint", description=_ABOUT)
    for name, summary in _ACTIONS.items():
        action = made.add_action(
            name,
            summary,
            description=_ABOUT_ACTION[name],
            examples=_EXAMPLES[name],
            takes_configuration=name == "convert",
        )
        _add_options(name, action)
    return made


def _add_options(name: str, action: CommandParser) -> None:
    add = action.add_argument
    metavar, about = ("SOURCE", "a folder in the given format") if name == "import" else ("PATH", _PATH)
    add("path", metavar=metavar, type=Path, help=about)
    if name == "inspect":
        add("--check", action="store_true", help="read every byte, and compare checksums")
        add("--json", action="store_true", help="print one JSON object")
        return
    add("target", metavar="TARGET", type=Path, help=_TARGET)
    if name in ("export", "import"):
        formats = (*_FORMATS, "peft") if name == "export" else _FORMATS
        add("--format", choices=formats, required=True, help="format of the folder")
        names = "dcp: use the parameter names of transformers, for llama or the model in a FOLDER"
        if name == "export":
            names = f"FOLDER of the Hugging Face model that was trained, {_IF_MISSING}; {names}"
        add("--model", metavar="MODEL", help=names)
        kinds = "dtype of parameters: float64, float32, float16 or bfloat16 (default: unchanged)"
        add("--dtype", choices=_DTYPES, metavar="DTYPE", help=kinds)
    size = "largest size of a file, such as 5GB (default: a single file)"
    add("--file-size", metavar="BYTES", type=_bytes, help=size)
    if name == "export":
        add("--heads", metavar="N", type=count, help=f"number of attention heads, {_IF_MISSING}")
        tokens = f"largest number of tokens in a sequence, {_IF_MISSING} (llama)"
        add("--context", metavar="N", type=count, help=tokens)
        base = f"base of the rotary embedding, {_IF_MISSING} (default: 10000)"
        add("--rope-base", metavar="X", type=_positive, help=base)


def split_options(argv: Sequence[str]) -> tuple[list[str], list[str]]:
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
