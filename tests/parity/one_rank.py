"""Models with values everywhere, on one rank: saved, loaded, and cut as many ranks would have them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import plait
from plait.checkpoint.file_system_calls import Disk
from plait.checkpoint.full_tensors import FullTensors
from plait.checkpoint.manifest import FILE, manifest_text
from plait.checkpoint.tensor_file import BoxToWrite, write_file
from plait.plan.layout import Flat, Layout
from plait.plan.layout.shards import shard_boxes

Build = Callable[[], nn.Sequential]
VOCAB, CONTEXT = 29, 6
SIZES: dict[str, int] = {"layers": 2, "hidden": 24, "vocab": VOCAB, "context": CONTEXT}
MODELS: dict[str, Build] = {
    "gpt2": partial(plait.models.gpt2, **SIZES, heads=6),
    "gpt2-untied": partial(plait.models.gpt2, **SIZES, heads=3, tied=False),
    "llama": partial(plait.models.llama, **SIZES, heads=6, kv_heads=2, inner=20, rope_base=500.0),
    "llama-tied": partial(plait.models.llama, **SIZES, heads=4, inner=20, tied=True),
}
HEADS = {"gpt2": 6, "gpt2-untied": 3, "llama": 6, "llama-tied": 4}


def lively(model: nn.Module, dtype: torch.dtype = torch.float64) -> Any:
    """A model with random values everywhere, in biases and norms too."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    if next(model.parameters()).is_meta:  # others keep their buffers
        model = model.to_empty(device="cpu")
    model = model.to(dtype)
    for first, *others in names.values():  # they may be shared no longer
        for name in others:
            module, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(module), attribute, model.get_parameter(first))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.4 * drawn + (parameter.dim() == 1))
    return model.eval()


def engine_of(model: nn.Module, values: Any = None) -> Any:
    """It, woven for one rank, in the dtype of its parameters."""
    wide = next(model.parameters()).dtype == torch.float64
    plan = plait.Plan(precision="fp64" if wide else "fp32")
    mesh = plait.Mesh(plan, timeout=20.0)
    return plait.parallelize(model, plan, mesh, loss=plait.cross_entropy, values=values)


def saved(model: nn.Module, path: Path, state: dict[str, Any] | None = None, values: Any = None) -> Path:
    """The checkpoint of a model."""
    plait.save(engine_of(model, values), None, path, state or {})
    return path


def loaded(build: Build, path: Path) -> nn.Sequential:
    """The model with the values that `plait.load` finds in a checkpoint."""
    model = lively(build())
    engine = engine_of(model)
    plait.load(engine, None, path)
    values = dict(engine.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])
    return model


def cut(source: Path, target: Path, ranks: int = 3) -> Path:
    """The same checkpoint as that of `ranks` ranks, each of which holds an interval of every tensor."""
    wholes = FullTensors(source)
    files = []
    target.mkdir()
    for rank in range(ranks):
        items = []
        for name, one in wholes.manifest.tensors.items():
            whole = wholes.read(name)
            bounds = tuple(whole.numel() * place // ranks for place in range(ranks + 1))
            layout = Layout(one.shape, {"shard": ranks}, {"shard": Flat(bounds)})
            for part in shard_boxes(layout, {"shard": rank}):
                view = whole[part.box.slices].clone()
                items.append(BoxToWrite(name, part.box, view.dtype, partial(_itself, view)))
        files.append(write_file(target / f"rank-{rank:05d}.safetensors", items, Disk()))
    (target / FILE).write_text(manifest_text(replace(wholes.manifest, files=tuple(files))))
    return target


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def tensors_in(path: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint."""
    wholes = FullTensors(path)
    return {name: wholes.read(name) for name in wholes.manifest.tensors}


def change(path: Path, **values: Any) -> None:
    """Other values in a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
