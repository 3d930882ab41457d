"""Adapters in the files of peft: a folder with adapter_config.json and adapter_model.safetensors.

peft names a tensor `base_model.model.PATH.lora_A.weight` (`down`) or `lora_B` (`up`), PATH being that of the
linear in the model of transformers. Those of experts: see `plait.models.peft_experts`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from plait.errors import ModelError, hub_remedy, listed
from plait.files import require_file, write_bytes
from plait.models.expert_lora import SUFFIX, ExpertLora, expert_matrices
from plait.models.huggingface.weight_files import json_object
from plait.models.lora import LoraLinear, adapt, adapters_of, copy_values, is_linear, require_sizes
from plait.models.peft_experts import from_peft, parameters_in_peft, paths_of_adapters, targeted, to_peft
from plait.plan.rules import join
from plait.tensor.autograd.deferred_weight_gradients import is_transposed_linear

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_HALF = {"A": "down", "B": "up"}
_READ = ("r", "lora_alpha", "lora_dropout", "target_parameters")
_WITHOUT_EFFECT = (
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"),
    # Which linears have adapters follows from the tensors.
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    "fan_in_fan_out",  # follows from the linear
    # Only read with settings that are refused, or before the first step.
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
    *("megatron_core", "runtime_config"),
)
"""Settings of peft that do not change what an adapter computes once it has values."""
_ACCEPTED: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("lora",),
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
}
"""What plait's adapters can be: the values of other settings, beside none and those that are off."""
_CHANGES_THE_BASE = ("pissa", "olora", "corda", "lora_ga")
"""Values of `init_lora_weights` from which peft computes other weights of the base when it reads a folder."""
_OFF: tuple[Any, ...] = (None, False, {}, [], "")


def load_adapter(model: nn.Module, folder: str | Path) -> dict[str, Tensor]:
    """Add the adapters in a folder of peft to `model`, as `lora` does; return their values by name.

    Their dropouts are in the mode of the linears: a model in evaluation mode has none until `train()`.
    A model with values also gets them; one on the meta device is given them with its other values:
    `parallelize(model, …, values={**weights, **adapter})`. Raises ModelError for files that cannot be read,
    for settings of peft that plait has not, and for adapters that do not fit the model.
    """
    if adapters_of(model):
        raise ModelError("the model has adapters already: give load_adapter a model without any.")
    folder = Path(folder)
    config, tensors = _read(folder)
    renamed = _renamed(model, folder, config, tensors)
    adapted = {name.removesuffix(".weight").rpartition(".")[0] for name in renamed}
    chosen = {path: one for path, one in model.named_modules() if path in adapted}
    experts = {path: one for path, one in expert_matrices(model).items() if path + SUFFIX in adapted}
    if not chosen and not experts:
        raise ModelError(f"{folder / WEIGHTS} has no adapters: give another folder.")
    rank, alpha, dropout = config.get("r"), config.get("lora_alpha"), config.get("lora_dropout") or 0.0
    try:
        require_sizes(rank, alpha, dropout)
    except ModelError as error:
        raise ModelError(f"{folder / CONFIG}: {error}") from None
    assert rank is not None
    assert alpha is not None
    if unlike := next((key for key, one in renamed.items() if rank not in one.shape), None):
        raise ModelError(
            f"{folder / CONFIG} has r = {rank}, and {WEIGHTS} has {unlike} as {list(renamed[unlike].shape)}: "
            "give another folder."
        )
    adapt(model, chosen, experts, rank=rank, alpha=alpha, dropout=dropout)
    _check_shapes(model, renamed, folder)
    copy_values(model, renamed)
    return renamed


def values_in(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    """Read an adapter's values from a folder of peft, by their names in `model`, which has the adapter.

    Raises ModelError as `load_adapter`.
    """
    values = _renamed(model, folder, *_read(folder))
    _check_shapes(model, values, folder)
    return values


def save_adapter(
    model: nn.Module, folder: str | Path, values: Mapping[str, Tensor] | None = None, base: str | None = None
) -> None:
    """Write the adapters of `model` to `folder`, as peft's `save_pretrained` does.

    `values`: those of the adapted model, such as `engine.state_dict()`; None: its own. `base`: the path or
    name of the model without adapters. Raises ModelError where the model has no adapters, where they are
    unlike, and where other parameters are trained, which a folder of peft would not hold.
    """
    from safetensors.torch import save

    adapters, given = adapters_of(model), dict(model.state_dict() if values is None else values)
    if not adapters:
        raise ModelError("the model has no adapters to save: give it some by plait.lora.")
    _require_alike(adapters)
    _require_nothing_beside(model, adapters)
    linears, experts = _paths_in_peft(model, adapters)
    tensors = {
        f"base_model.model.{(linears | experts)[path]}.lora_{letter}.weight": _to_peft(one, given, path, half)
        for path, one in adapters.items()
        for letter, half in zip("AB", one.halves, strict=True)
    }
    first = next(iter(adapters.values()))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": first.rank,
        "lora_alpha": first.alpha,
        "lora_dropout": 0.0 if first.dropout is None else first.dropout.p,
        "target_modules": sorted(linears.values()),
        "fan_in_fan_out": any(is_transposed_linear(model.get_submodule(f"{path}.base")) for path in linears),
        "bias": "none",
        "inference_mode": True,
    }
    if experts:
        theirs = parameters_in_peft(model)
        config["target_parameters"] = sorted(theirs[path.removesuffix(SUFFIX)] for path in experts)
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    write_bytes(target / WEIGHTS, save(tensors, metadata={"format": "pt"}))
    write_bytes(target / CONFIG, f"{json.dumps(config, indent=2)}\n".encode())


def _paths_in_peft(
    model: nn.Module, adapters: Mapping[str, LoraLinear | ExpertLora]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the path in peft's model of each adapter by its path in `model`: of linears, and of experts."""
    theirs, parameters = _names_in_peft(model), parameters_in_peft(model)
    of_experts = [path for path, one in adapters.items() if isinstance(one, ExpertLora)]
    nested = paths_of_adapters([parameters[path.removesuffix(SUFFIX)] for path in of_experts])
    linears = {path: theirs[path] for path in adapters if path not in of_experts}
    return linears, {path: nested[parameters[path.removesuffix(SUFFIX)]] for path in of_experts}


def _to_peft(one: LoraLinear | ExpertLora, given: Mapping[str, Tensor], path: str, half: str) -> Tensor:
    """Return half of an adapter, of the values `given`, as peft has it."""
    tensor = given[f"{path}.{half}"]
    return (to_peft(tensor, half) if isinstance(one, ExpertLora) else tensor).contiguous()


def _require_alike(adapters: Mapping[str, LoraLinear | ExpertLora]) -> None:
    """Raise ModelError where adapters differ in rank, alpha or dropout, of which a folder has one."""
    kinds = {
        (one.rank, one.alpha, 0.0 if one.dropout is None else one.dropout.p): path
        for path, one in adapters.items()
    }
    if len(kinds) > 1:
        (one, first), (other, second), *_ = kinds.items()
        raise ModelError(
            f"the adapters of {first} and {second} differ in rank, alpha or dropout ({one} and {other}), of "
            "which a folder of peft has one each: give all adapters the same, or save merged_values."
        )


def _require_nothing_beside(model: nn.Module, adapters: Mapping[str, LoraLinear | ExpertLora]) -> None:
    """Raise ModelError for parameters that are trained and are not an adapter's."""
    saved = {id(half) for one in adapters.values() for half in one.halves.values()}
    trained = (name for name, one in model.named_parameters() if one.requires_grad and id(one) not in saved)
    if beside := list(trained):
        raise ModelError(
            f"{listed(beside, most=4)} train beside the adapters, and plait writes adapters only to "
            "folders of peft: freeze them (requires_grad_(False)), or save merged_values or a checkpoint."
        )


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the configuration and the tensors in a folder of peft."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    wanted = f"give a folder of peft, with {CONFIG} and {WEIGHTS}{hub_remedy(str(folder))}"
    config = json_object(folder / CONFIG, wanted)
    try:
        require_file(folder / WEIGHTS)
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ModelError(f"{folder / WEIGHTS} cannot be read ({reason}): {wanted}.") from None
    for key, value in config.items():
        if not _is_accepted(key, value):
            raise ModelError(
                f"{folder / CONFIG} has {key} = {value!r}, which plait's adapters have not: "
                f"{_remedy(key, value)}, or merge the adapter with peft."
            )
    return config, tensors


def _is_accepted(key: str, value: object) -> bool:
    """Return whether plait's adapters compute what peft's do with this setting."""
    if key in _READ or key in _WITHOUT_EFFECT or value in _OFF:
        return True
    return (value.lower() if isinstance(value, str) else value) in _ACCEPTED.get(key, ())


def _remedy(key: str, value: object) -> str:
    """Return how to train an adapter that plait can read, in place of one with this setting."""
    if key == "init_lora_weights" and str(value).lower().startswith(_CHANGES_THE_BASE):
        return (
            "it changes the base's weights, so save it with peft's path_initial_model_for_weight_conversion"
        )
    return f"train with {key} = {_ACCEPTED[key][0]}" if key in _ACCEPTED else "train without it"


def _renamed(
    model: nn.Module, folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors of peft by the names that they have in `model` with adapters."""
    paths = {theirs: path for path, theirs in _names_in_peft(model).items()}
    experts, matrices = _experts_in_peft(model, folder, config), expert_matrices(model)
    found = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is not None and match[1] in experts:
            name, half = experts[match[1]], _HALF[match[2]]
            found[f"{name}{SUFFIX}.{half}"] = from_peft(tensor, half, len(matrices[name].weight))
            continue
        path = paths.get(match[1]) if match else None
        module = None if path is None else model.get_submodule(path)
        if match is None or module is None or not (is_linear(module) or isinstance(module, LoraLinear)):
            raise ModelError(
                f"{folder / WEIGHTS} has {key}, which is no adapter of a linear of the model, nor of experts "
                f"that target_parameters in {CONFIG} names: give the model for which it was trained."
            )
        found[f"{path}.{_HALF[match[2]]}.weight"] = tensor
    for theirs, name in experts.items():
        if f"{name}{SUFFIX}.down" not in found:
            raise ModelError(
                f"{folder / CONFIG} has target_parameters for {name}, and {WEIGHTS} has no adapter of it "
                f"({theirs}): give a folder that is whole."
            )
    return found


def _experts_in_peft(model: nn.Module, folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the names in `model` of experts' parameters, by the path in peft of the adapter of each."""
    names = {theirs: path for path, theirs in parameters_in_peft(model).items()}
    targets = config.get("target_parameters") or ()
    return {
        theirs: names[parameter]
        for parameter, theirs in paths_of_adapters(targeted(targets, names, str(folder / CONFIG))).items()
    }


def _names_in_peft(model: nn.Module) -> dict[str, str]:
    """Return the path in peft's model of each module of `model` that has a weight, by its path."""
    names, adapters = getattr(model, "huggingface_names", None), adapters_of(model)
    found = {}
    for path, module in model.named_modules():
        if path.endswith(".base") and path.removesuffix(".base") in adapters:
            continue
        weight = "base.weight" if path in adapters else "weight"
        if names is not None and join(path, weight) in names:
            found[path] = names[join(path, weight)].removesuffix(".weight")
        elif names is None and hasattr(module, "weight"):
            found[path] = path
    return found


def _check_shapes(model: nn.Module, values: Mapping[str, Tensor], folder: Path) -> None:
    wanted = {
        f"{path}.{half}": weight.shape
        for path, one in adapters_of(model).items()
        for half, weight in one.halves.items()
    }
    faults = [f"{name} is missing" for name in wanted if name not in values]
    faults += [
        f"{name} is {list(one.shape)} and not {list(wanted[name])}"
        for name, one in values.items()
        if one.shape != wanted[name]
    ]
    if faults:
        raise ModelError(
            f"the adapters in {folder} do not fit ({listed(faults, between='; ')}): give those of this model."
        )
