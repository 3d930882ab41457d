"""`plait checkpoint`: inspect checkpoints, convert them, and export and import other formats."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from plait.app.cli.checkpoint_options import parser as parser
from plait.app.cli.checkpoint_options import read_options
from plait.app.cli.ranks_and_signals import importing
from plait.app.config.model_section import OWN_MODELS
from plait.errors import ConfigError, listed, terminal_text
from plait.plan.plan import Plan

if TYPE_CHECKING:
    import torch

    from plait.checkpoint.inspecting import Summary
    from plait.checkpoint.manifest import Manifest

_MOST_SHOWN = 60
"""Characters of a value of the state."""


def run(argv: Sequence[str]) -> int:
    """Run the action that `argv` names. Return 0, or 1 where `inspect` finds a damaged checkpoint.

    Raises `PlaitError` for errors that the user can correct.
    """
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
        from plait.checkpoint.converting import convert, convert_for
        from plait.checkpoint.folders import resolve
        from plait.checkpoint.manifest import read_manifest

    if not options.of_run:
        convert(options.path, options.target, max_bytes=options.file_size)
        return
    shard_plan = shard_plan_for(read_manifest(resolve(options.path)), options.of_run)
    convert_for(options.path, options.target, shard_plan)


def _exchange_with_torch(options: Namespace) -> None:
    with importing():
        dcp = import_module("plait.checkpoint.dcp")
    names = _names_of(options.model)
    if options.action == "export":
        dcp.export_dcp(options.path, options.target, names)
        return
    left_out = dcp.import_dcp(options.path, options.target, names)
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
        from plait.app.train.run_checkpoints import merged_tensors, trained_tokenizer, write_peft_adapter
        from plait.checkpoint.box_reader import FullTensors
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
