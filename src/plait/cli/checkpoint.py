"""`plait checkpoint`: look into checkpoints, write them anew, carry them to and from other formats."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.cli.checkpoint_options import ABOUT, parsers, read
from plait.cli.checkpoint_table import show
from plait.cli.ranks_and_signals import importing
from plait.errors import ConfigError, listed
from plait.train.model_folder import OWN_MODELS

if TYPE_CHECKING:
    import torch

    from plait.checkpoint.manifest import Manifest


def run(argv: Sequence[str]) -> int:
    """Do what `argv` asks. Returns 0, or 1 for `inspect` of a checkpoint that is damaged.

    Raises `PlaitError` where the user has something to mend.
    """
    actions = parsers()
    if not argv or {"--help", "-h"} & set(argv):
        print(actions[argv[0]].format_help() if argv and argv[0] in actions else ABOUT)
        return 0 if argv else 2
    options = read(argv)
    if options.action == "inspect":
        return _inspect(options)
    if options.action == "convert":
        _convert(options)
    elif options.format == "dcp":
        _to_or_from_torch(options)
    elif options.action == "export":
        _export(options)
    else:
        _import(options)
    print(_wrote(options.target))
    return 0


def _inspect(options: Namespace) -> int:
    with importing():
        from plait.checkpoint.inspecting import summary

    found = summary(options.path, check=options.check)
    if options.json:
        print(json.dumps(asdict(found), indent=2))
    else:
        show(found)
    return 1 if found.flaws else 0


def _convert(options: Namespace) -> None:
    with importing():
        from plait.checkpoint.converting import convert, convert_for
        from plait.checkpoint.folders import resolve
        from plait.checkpoint.manifest import read_manifest
        from plait.train.checkpoints import shard_plan_for

    if not options.of_run:
        convert(options.path, options.target, max_bytes=options.file_size)
        return
    shard_plan = shard_plan_for(read_manifest(resolve(options.path)), options.of_run)
    convert_for(options.path, options.target, shard_plan)


def _to_or_from_torch(options: Namespace) -> None:
    with importing():
        dcp = import_module("plait.checkpoint.dcp")
    names = _names_of(options.model)
    if options.action == "export":
        dcp.export_dcp(options.path, options.target, names)
        return
    left_out = dcp.import_dcp(options.path, options.target, names)
    if left_out:
        print(f"left out {listed(left_out)}")


def _names_of(model: str | None) -> Mapping[str, str] | None:
    """Return for each of plait's names of parameters that of transformers; None: names stay."""
    if model is None:
        return None
    if model == "gpt2":
        raise ConfigError(
            "--model gpt2: plait's own gpt2 keeps apart what transformers' GPT-2 keeps in one matrix: give "
            "the FOLDER of a GPT-2 of transformers, which `plait train --model.name FOLDER` trains as it is."
        )
    with importing():
        from plait.checkpoint.renaming import LLAMA_NAMES
        from plait.models.huggingface.folder import model_in
    if model == "llama":
        return LLAMA_NAMES
    names: Mapping[str, str] = model_in(Path(model).expanduser()).huggingface_names  # type: ignore[assignment]
    return names


def _export(options: Namespace) -> None:
    with importing():
        from plait.checkpoint.full_tensor_files import FullTensors
        from plait.checkpoint.huggingface.exporting import export_adapted, export_own
        from plait.checkpoint.huggingface.model_sizes import sizes_from_manifest
        from plait.models.huggingface.folder import model_in

    wholes = FullTensors(options.path)
    more: dict[str, Any] = {"dtype": _dtype(options), "max_bytes": options.file_size}
    told = {name: getattr(options, name) for name in ("heads", "context", "rope_base")}
    own = any(value is not None for value in told.values())
    folder = None if own else _trained_folder(wholes.manifest)
    folder = folder if options.model is None else Path(options.model).expanduser()
    if folder is not None:
        export_adapted(wholes, options.target, model_in(folder), folder, **more)
        return
    export_own(wholes, options.target, sizes_from_manifest(wholes.manifest, **told), **more)


def _import(options: Namespace) -> None:
    with importing():
        from plait.checkpoint.huggingface.importing import import_folder

    import_folder(options.path, options.target, dtype=_dtype(options), max_bytes=options.file_size)


def _trained_folder(manifest: Manifest) -> Path | None:
    """The model of Hugging Face that `plait train` says it trained."""
    from plait.checkpoint.manifest import section

    name = section(manifest.state, "config", "model").get("name", OWN_MODELS[0])
    return None if name in OWN_MODELS or not isinstance(name, str) else Path(name).expanduser()


def _dtype(options: Namespace) -> torch.dtype | None:
    import torch

    return None if options.dtype is None else getattr(torch, options.dtype)


def _wrote(target: Path) -> str:
    files = [path for path in target.rglob("*") if path.is_file()]
    counted = f"{len(files)} file{'s' if len(files) > 1 else ''}"
    return f"wrote {target}: {counted}, {sum(path.stat().st_size for path in files):,} bytes"
