"""Names and shapes of experts' adapters in files of peft, which adapts them by `target_parameters`.

peft wraps the module of the experts once for each parameter. Where there are two adapters, `PATH.base_layer`
has that of the first parameter, and `PATH` that of the second. With E experts, `lora_A` is `[E · rank, in]`,
one expert after another, and `lora_B` `[out, rank · E]`, in which the experts of a rank are neighbours.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import Tensor, nn

from plait.errors import ModelError
from plait.models.expert_lora import MATRICES, expert_matrices


def parameters_in_peft(model: nn.Module) -> dict[str, str]:
    """Return the name in peft's model of each parameter of experts, by its name in `model`."""
    names = getattr(model, "huggingface_names", None)
    paths = expert_matrices(model)
    return {path: path for path in paths} if names is None else {path: names[path] for path in paths}


def targeted(targets: Iterable[str], parameters: Collection[str], where: str) -> list[str]:
    """Return the `parameters` (names in peft's model of experts' matrices) that `target_parameters` select.

    `targets`: those `target_parameters` of a folder of peft. Raises ModelError where one names none; `where`:
    the file, for the error.
    """
    found: list[str] = []
    for target in targets:
        fitting = [name for name in parameters if f".{name}".endswith(f".{target}")]
        if not fitting:
            raise ModelError(
                f"{where} has target_parameters with {target!r}, an adapter of experts, and the model has no "
                f"{' or '.join(MATRICES)} of experts by that name: give the model for which it was trained."
            )
        found += fitting
    return list(dict.fromkeys(found))


def paths_of_adapters(parameters: Collection[str]) -> dict[str, str]:
    """Return the path of each parameter's adapter in peft's model; all of `parameters` have an adapter."""
    found = {}
    for name in parameters:
        path, _, own = name.rpartition(".")
        later = MATRICES[MATRICES.index(own) + 1 :]
        found[name] = path + ".base_layer" * sum(f"{path}.{other}" in parameters for other in later)
    return found


def from_peft(tensor: Tensor, half: str, experts: int) -> Tensor:
    """Return `lora_A` as `down [E, rank, in]`, `lora_B` as `up [E, out, rank]`; other shapes unchanged.

    Unchanged are tensors without two dims, and those that `experts` does not divide.
    """
    dim = 0 if half == "down" else 1
    if tensor.dim() != 2 or tensor.shape[dim] % experts:
        return tensor
    if half == "down":
        return tensor.view(experts, -1, tensor.shape[1])
    return tensor.reshape(len(tensor), -1, experts).permute(2, 0, 1).contiguous()


def to_peft(tensor: Tensor, half: str) -> Tensor:
    """Return `down [E, rank, in]` as `lora_A`, or `up [E, out, rank]` as `lora_B`."""
    return tensor.flatten(0, 1) if half == "down" else tensor.permute(1, 2, 0).flatten(1)
