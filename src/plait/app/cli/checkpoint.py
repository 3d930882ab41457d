"""`plait checkpoint`: inspect checkpoints, convert them, and export and import other formats."""

from __future__ import annotations

import json
import re
from argparse import ArgumentTypeError, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from plait.app.cli.arguments import CommandParser, count, number, split_options
from plait.app.cli.ranks_and_signals import importing
from plait.app.config.model_section import OWN_MODELS
from plait.errors import ConfigError, listed, terminal_text
from plait.plan.plan import Plan

if TYPE_CHECKING:
    import torch

    from plait.checkpoint.inspecting import Summary
    from plait.checkpoint.manifest import Manifest

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
_MOST_SHOWN = 60
"""Characters of a value of the state."""


def read_options(argv: Sequence[str]) -> Namespace:
    """Parse `argv`: `.action` names the action, `.of_run` has configuration options as `--parallel.tp 2`.

    Raises ConfigError for options that do not go together.
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
    """Return the parser of the actions of `plait checkpoint`, without the options of the configuration."""
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


def run(argv: Sequence[str]) -> int:
    """Run the action that `argv` names. Return 0, or 1 where `inspect` finds a damaged checkpoint."""
    options = read_options(argv)
    if options.action == "inspect":
        return _inspect(options)
    if options.action == "convert":
        _convert(options)
    elif options.format == "dcp":
        _exchange_with_torch(options)
    elif options.action == "export":
        _export(options)
    else:
        _import(options)
    files = [path for path in options.target.rglob("*") if path.is_file()]
    counted = f"{len(files)} file{'s' if len(files) > 1 else ''}"
    print(f"wrote {options.target}: {counted}, {sum(path.stat().st_size for path in files):,} bytes")
    return 0


def _inspect(options: Namespace) -> int:
    with importing():
        from plait.checkpoint.inspecting import summary

    found = summary(options.path, check=options.check)
    if options.json:
        print(json.dumps(asdict(found), indent=2))
    else:
        _print_summary(found)
    return 1 if found.flaws else 0


def _convert(options: Namespace) -> None:
    with importing():
        from plait.app.train.run_checkpoints import shard_plan_for
        from plait.checkpoint.folders import resolve
        from plait.checkpoint.manifest import read_manifest
        from plait.checkpoint.rewriting import convert, convert_for

    if not options.of_run:
        convert(options.path, options.target, max_bytes=options.file_size)
        return
    shard_plan = shard_plan_for(read_manifest(resolve(options.path)), options.of_run)
    convert_for(options.path, options.target, shard_plan)


def _exchange_with_torch(options: Namespace) -> None:
    with importing():
        from plait.checkpoint.dcp import export_dcp, import_dcp

    names = _names_of(options.model)
    if options.action == "export":
        export_dcp(options.path, options.target, names)
        return
    left_out = import_dcp(options.path, options.target, names)
    if left_out:
        print(terminal_text(f"left out {listed(left_out)}"))


def _names_of(model: str | None) -> Mapping[str, str] | None:
    """Return transformers' parameter names by plait's, for `--model`; None if names do not change."""
    if model is None:
        return None
    if model == "gpt2":
        raise ConfigError(
            "--model gpt2: plait's own gpt2 has several matrices where transformers' GPT-2 has one: give "
            "the FOLDER of a GPT-2 of transformers, which `plait train --model.name FOLDER` trains as it is."
        )
    with importing():
        from plait.checkpoint.huggingface.tensor_names import LLAMA_NAMES
        from plait.models.huggingface.pretrained import model_in
    if model == "llama":
        return LLAMA_NAMES
    names: Mapping[str, str] = model_in(Path(model).expanduser()).huggingface_names  # type: ignore[assignment]
    return names


def _export(options: Namespace) -> None:
    with importing():
        from plait.app.train.trained_model import merged_tensors, trained_tokenizer, write_peft_adapter
        from plait.checkpoint.full_tensors import FullTensors
        from plait.checkpoint.huggingface.config_json import sizes_from_manifest
        from plait.checkpoint.huggingface.export_import import export_adapted, export_own
        from plait.models.huggingface.pretrained import model_in

    tensors = FullTensors(options.path)
    sizes = {name: getattr(options, name) for name in ("heads", "context", "rope_base")}
    own = any(value is not None for value in sizes.values())
    folder = None if own else _trained_folder(tensors.manifest)
    folder = folder if options.model is None else Path(options.model).expanduser()
    if options.format == "peft":
        if folder is None:
            raise ConfigError(
                f"{options.path} is of a model of plait's own, or of one whose folder it does not record: "
                "give the folder by --model, or --format huggingface, which merges adapters."
            )
        write_peft_adapter(tensors, folder, options.target)
        return
    merged = merged_tensors(tensors, folder)
    more: dict[str, Any] = {"dtype": _dtype(options), "max_bytes": options.file_size}
    if folder is not None:
        export_adapted(merged, options.target, model_in(folder), folder, **more)
        return
    tokenizer = trained_tokenizer(tensors.manifest)
    of_model = sizes_from_manifest(merged.manifest, **sizes)
    export_own(merged, options.target, of_model, tokenizer=tokenizer.files, end=tokenizer.end, **more)
    if tokenizer.note:
        print(terminal_text(tokenizer.note))


def _import(options: Namespace) -> None:
    with importing():
        from plait.checkpoint.huggingface.export_import import import_folder

    import_folder(options.path, options.target, dtype=_dtype(options), max_bytes=options.file_size)


def _trained_folder(manifest: Manifest) -> Path | None:
    """Return the folder of the Hugging Face model that was trained, or None for a model of plait."""
    from plait.checkpoint.manifest import section

    name = section(manifest.state, "config", "model").get("name", OWN_MODELS[0])
    return None if name in OWN_MODELS or not isinstance(name, str) else Path(name).expanduser()


def _dtype(options: Namespace) -> torch.dtype | None:
    import torch

    return None if options.dtype is None else getattr(torch, options.dtype)


def _print_summary(found: Summary) -> None:
    console = Console(markup=False, highlight=False)
    facts = {
        "checkpoint": found.path,
        "is": _state_of_files(found),
        "state": _values(found.state),
        "run": _values(found.run),
        "plan": _plan(found.plan),
        "optimizer": found.optimizer or "none",
        "model": f"{found.elements:,} elements",
        "files": f"{len(found.files)}, {found.bytes:,} bytes",
        "written by": ", ".join(f"{name} {version}" for name, version in found.versions.items()),
    }
    lines = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    lines.add_column(no_wrap=True)
    lines.add_column(overflow="fold")
    for name, value in facts.items():
        lines.add_row(name, terminal_text(value) or "nothing")
    console.print(lines)
    console.print()
    console.print(_tensors(found))
    for flaw in found.flaws:
        print(terminal_text(f"damaged: {flaw}"))  # not wrapped, unlike what `console` prints


def _state_of_files(found: Summary) -> str:
    if found.flaws:
        return "damaged, see below"
    return "complete" if found.checked else "complete by the sizes of its files; --check reads them"


def _tensors(found: Summary) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("tensor", overflow="fold")
    table.add_column("shape", no_wrap=True)
    table.add_column("dtype", no_wrap=True)
    table.add_column("boxes", justify="right", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    for one in found.tensors:
        shape = " × ".join(map(str, one.shape)) or "()"
        table.add_row(terminal_text(one.name), shape, one.dtype, str(one.boxes), f"{one.bytes:,}")
    return table


def _plan(plan: Mapping[str, Any]) -> str:
    """Return as text the fields of a saved plan that differ from the default."""
    if not plan:
        return "none"
    default = json.loads(json.dumps(asdict(Plan())))
    changed = {name: value for name, value in plan.items() if name not in default or value != default[name]}
    return _values(changed) or "the default, of one rank"


def _values(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {_short(value)}" for name, value in values.items())


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    if len(text) <= _MOST_SHOWN:
        return text
    return f"{{{', '.join(value)}}}" if isinstance(value, Mapping) else f"{text[: _MOST_SHOWN - 1]}…"
