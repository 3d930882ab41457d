"""The model of Hugging Face that a run of `plait train` trained, from its checkpoint; its adapters."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from torch import nn

from plait.autograd.deferred_weight_gradients import is_transposed_linear
from plait.checkpoint.box_reader import FullTensors
from plait.checkpoint.disk import Disk
from plait.checkpoint.folders import atomic_folder
from plait.checkpoint.huggingface.exporting import Adapter
from plait.checkpoint.manifest import Manifest, section
from plait.checkpoint.rank_contents import parameter_key
from plait.models.low_rank_adaptation import HALVES, adapters_of, added
from plait.models.peft_adapters import save_adapter
from plait.train.build import build_model
from plait.train.config_sections import LoraConfig, ModelConfig


def trained_model(manifest: Manifest, folder: Path) -> nn.Sequential:
    """Return the model in `folder` on the meta device, with the adapters that the run gave it."""
    lora = LoraConfig.model_validate(section(manifest.state, "config", "model", "lora"))
    return build_model(ModelConfig(name=str(folder), lora=lora), vocab=1)


def adapters_to_merge(model: nn.Module) -> dict[str, Adapter]:
    """Return the adapters of `model` by the name of the weight to which an export adds each."""
    return {
        f"{path}.base.weight": Adapter(
            {f"{path}.{half}.weight": tuple(one.get_parameter(f"{half}.weight").shape) for half in HALVES},
            partial(added, scale=one.scale, transposed=is_transposed_linear(one.base)),
        )
        for path, one in adapters_of(model).items()
    }


def write_peft_adapter(tensors: FullTensors, model: nn.Module, base: Path, target: Path) -> None:
    """Write the adapters in a checkpoint to the new folder `target`, as peft does; `base`: the model's."""
    names = [name for adapter in adapters_to_merge(model).values() for name in adapter.shapes]
    values = {name: tensors.read(parameter_key(name)) for name in names}
    with atomic_folder(target, Disk()) as folder:
        save_adapter(model, folder, values, str(base))
