"""Folders of checkpoints and models of which somebody has changed a file: read as they were, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as distributed
from test_dcp import cut, cuts
from torch import nn

import plait
from mutated_files import ALL, QUICK, Kind, outcomes, remove
from parity import huggingface_cases as cases
from plait.checkpoint.dcp import import_dcp
from plait.checkpoint.folders import resolve
from plait.checkpoint.full_tensors import FullTensors
from plait.errors import CheckpointError, PlaitError
from plait.models.huggingface.pretrained import model_in, weights_in
from plait.models.huggingface.weight_files import INDEX, files_of_tensors
from plait.models.peft_files import load_adapter, save_adapter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
NUMBERS = [QUICK, pytest.param(ALL, marks=pytest.mark.full)]


def values_of(folder: Path) -> dict[str, Any]:
    """All that a checkpoint of plait holds."""
    tensors = FullTensors(folder)
    read = {name: tensors.read(name).double().tolist() for name in tensors.manifest.tensors}
    return read | {"state": tensors.manifest.state}


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(
    ("name", "kind"),
    [("manifest.json", "json"), ("manifest.json", "binary"), ("rank-00000.safetensors", "binary")],
)
def test_a_mutated_checkpoint_loads_what_was_written_or_is_refused_as_damaged(
    tmp_path: Path, name: str, kind: Kind, number: int
) -> None:
    source = cut(tmp_path, cuts()).rename(tmp_path / "step-00000001")
    before = values_of(source)
    for what, found in outcomes(source, name, kind, values_of, number, tmp_path / "work"):
        is_told = isinstance(found, CheckpointError) and found.damaged  # `resume` takes the one before
        assert is_told or found == before, (what, found)


@pytest.mark.parametrize("number", NUMBERS)
def test_the_best_checkpoint_is_one_of_those_that_are_there(tmp_path: Path, number: int) -> None:
    source = tmp_path / "source"
    cut(source, cuts()).rename(source / "step-00000003")
    (source / "best.json").write_text('{"step": 3, "validation_loss": 1.5}\n')
    read = lambda folder: resolve(folder / "best").name  # noqa: E731
    for what, found in outcomes(source, "best.json", "json", read, number, tmp_path / "work"):
        assert isinstance(found, CheckpointError) or found == "step-00000003", what


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_mutated_checkpoint_of_torch_is_read_or_refused(tmp_path: Path, name: str, number: int) -> None:
    whole = {"model": {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(4)}, "optim": {"state": {}}}
    distributed.save(whole, checkpoint_id=tmp_path / "torch", no_dist=True)

    def read(folder: Path) -> dict[str, Any]:
        remove(tmp_path / "native")
        import_dcp(folder, tmp_path / "native")
        return values_of(tmp_path / "native")

    before = read(tmp_path / "torch")
    for what, found in outcomes(tmp_path / "torch", name, "binary", read, number, tmp_path / "work"):
        if name == ".metadata" and isinstance(found, dict):
            same = [found[key] == before[key] for key in found.keys() & before.keys()]
            assert all(same), what  # others have another name


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "llama"
    cases.drawn(lambda: cases.llama(vocab_size=30)).float().save_pretrained(folder, max_shard_size="8KB")
    assert (folder / INDEX).is_file()
    return folder


def weights_of(folder: Path) -> dict[str, Any]:
    built = model_in(folder)
    weights = weights_in(folder, built)
    assert weights is not None
    return {name: one[:] for name, one in weights.items()}


@pytest.mark.transformers
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(
    ("name", "kind", "read"),
    [
        ("config.json", "json", weights_of),
        (INDEX, "json", files_of_tensors),
        ("", "binary", weights_of),
    ],
)
def test_a_mutated_model_folder_is_read_or_refused(
    model: Path, tmp_path: Path, name: str, kind: Kind, read: Callable[[Path], Any], number: int
) -> None:
    before, name = read(model), name or min(file.name for file in model.glob("model-*"))
    for what, found in outcomes(model, name, kind, read, number, tmp_path):
        assert isinstance(found, PlaitError) or found.keys() == before.keys(), what


def adapted() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(
    ("name", "kind"), [("adapter_config.json", "json"), ("adapter_model.safetensors", "binary")]
)
def test_a_mutated_adapter_folder_is_read_or_refused(
    tmp_path: Path, name: str, kind: Kind, number: int
) -> None:
    plait.lora(model := adapted(), targets=["0"], rank=2)
    save_adapter(model, tmp_path / "adapter")
    for what, found in outcomes(
        tmp_path / "adapter",
        name,
        kind,
        lambda folder: load_adapter(adapted(), folder),
        number,
        tmp_path / "work",
    ):
        assert isinstance(found, PlaitError) or set(found) == {"0.down.weight", "0.up.weight"}, what
