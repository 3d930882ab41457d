"""Chooses the linears of a model that `Plan.linears` casts to float8: not heads, tied ones, adapters, ….

In 16 bits stay the model's last linear and those with the rule `vocabulary` (heads, whose rounding changes
each probability), linears whose weight is another module's too (an embedding's), adapters of LoRA, modules
with the rules `replicated` and `partitioned`, those of a subclass of `nn.Linear`, those with hooks or a
forward of their own, and those with sizes that are no multiple of 16. Routers are no linears. Of experts
both matrices are chosen, or none, by the same reasons.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from plait.errors import ModelError, PlanError, listed
from plait.models.lora import LoraLinear
from plait.plan.layout.layout import Layout, Shard
from plait.plan.rules import Rule, join
from plait.tensor.autograd.deferred_weight_gradients import is_transposed_linear
from plait.tensor.experts.expert_casts import EXPERT_RECIPE
from plait.tensor.experts.expert_layouts import experts_in
from plait.tensor.experts.experts import Experts
from plait.tensor.find_module_hooks import is_altered
from plait.tensor.float8.scaled_product import MULTIPLE, is_multiple
from plait.tensor.named_layer import NamedLayer
from plait.tensor.nested_values import Value, map_tensors

OTHER_RULES = {"vocabulary": "head", "replicated": "replicated", "partitioned": "partitioned"}
"""By rule why a linear stays as it is."""
FREE_OF_VALUES = frozenset({"shape", "size", "dim", "ndim", "numel", "__len__", "device", "requires_grad"})
"""Attributes and methods of a tensor that are the same whatever its numbers and its dtype are."""
MOST_LISTED = 3
"""Paths that a sentence lists for each reason."""


@dataclass(frozen=True)
class LinearChoice:
    """The linears of a model that multiply in float8, and the others."""

    chosen: tuple[str, ...]
    """Paths, in the order of the model."""
    others: Mapping[str, str]
    """Why each of the other linears, or experts, stays as it is, by path."""
    experts: tuple[str, ...] = ()
    """Paths of the experts whose outputs and input gradients are products in float8."""

    def line(self, recipe: str) -> str:
        """Return a sentence on which linears multiply in float8, and why others do not."""
        alike: dict[str, list[str]] = {}
        for path, why in self.others.items():
            alike.setdefault(why, []).append(path)
        rest = "; ".join(f"{listed(paths, most=MOST_LISTED)} ({why})" for why, paths in alike.items())
        others = f"; the others stay in the run's precision: {rest}" if rest else ""
        count = len(self.experts)
        experts = f", and {count} layer{'s' * (count > 1)} of experts in {EXPERT_RECIPE}" if count else ""
        return f"Linears: {len(self.chosen)} multiply in {recipe}{experts}{others}."

    def formats(self, recipe: str) -> dict[str, str]:
        """Return by path the recipe of each linear, and of experts, or why it stays as it is."""
        chosen, experts = dict.fromkeys(self.chosen, recipe), dict.fromkeys(self.experts, EXPERT_RECIPE)
        return {**chosen, **experts, **self.others}

    def within(self, layer: str) -> tuple[str, ...]:
        """Return the names, in the layer at a path, of its linears and experts that multiply in float8."""
        start = f"{layer}." if layer else ""
        return tuple(
            path.removeprefix(start)
            for path in (*self.chosen, *self.experts)
            if path == layer or path.startswith(start)
        )


NO_LINEARS = LinearChoice((), {})
"""Without `Plan.linears`."""


def choose_linears(layers: Sequence[NamedLayer], rules: Mapping[str, Rule]) -> LinearChoice:
    """Return which linears multiply in float8; `rules`: the tensor-parallel rules of modules by path."""
    linears = {
        join(layer.path, name): module
        for layer in layers
        for name, module in layer.module.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Linear) or is_transposed_linear(module)
    }
    adapters = {
        id(half)
        for layer in layers
        for module in layer.module.modules()
        if isinstance(module, LoraLinear)
        for half in (module.down, module.up)
    }
    users = _users_of_weights(layers)
    head = next((path for path, module in reversed(linears.items()) if id(module) not in adapters), None)
    chosen, others = list[str](), dict[str, str]()
    for path, module in linears.items():
        rule = rules.get(path)
        if path == head:
            others[path] = "head"
        elif id(module) in adapters:
            others[path] = "adapter"
        elif rule is not None and rule.kind in OTHER_RULES:
            others[path] = OTHER_RULES[rule.kind]
        elif users[id(module.weight)] > 1:
            others[path] = "tied"
        elif type(module) is not nn.Linear and isinstance(module, nn.Linear):
            others[path] = "subclass"
        elif is_altered(module):
            others[path] = "hooks"
        elif not is_multiple(*module.weight.shape):
            others[path] = "sizes"
        else:
            chosen.append(path)
    experts = {
        join(layer.path, name): _reason(module, users)
        for layer in layers
        for name, module in experts_in(layer.module)
    }
    others |= {path: why for path, why in experts.items() if why}
    return LinearChoice(tuple(chosen), others, tuple(path for path, why in experts.items() if not why))


def _reason(experts: Experts, users: Mapping[int, int]) -> str:
    """Return the reason for which experts stay in 16 bits, "" where they multiply in float8."""
    matrices = experts.gate_up_proj, experts.down_proj
    if any(users[id(one)] > 1 for one in matrices):
        return "tied"
    if type(experts) is not Experts:
        return "subclass"
    if is_altered(experts):
        return "hooks"
    return "" if all(is_multiple(*one.shape[1:]) for one in matrices) else "sizes"


def _users_of_weights(layers: Sequence[NamedLayer]) -> Counter[int]:
    """Return the number of modules that have each parameter, by its id."""
    modules = {id(module): module for layer in layers for module in layer.module.modules()}
    return Counter(
        id(parameter) for module in modules.values() for parameter in module.parameters(recurse=False)
    )


def require_multipliable(choice: LinearChoice, layouts: Mapping[str, Layout], recipe: str) -> None:
    """Raise PlanError if no linear is chosen, or `tp` or `etp` divides one as float8 does not allow.

    CUDA refuses parts with sizes that are no multiples of 16; nor may ranks of `tp` hold the same features.
    `layouts`: of the parameters, by name.
    """
    if not choice.chosen and not choice.experts:
        raise PlanError(
            f"plan.linears is {recipe!r}, but no linear of the model can multiply in float8 "
            f"({listed([f'{path}: {why}' for path, why in choice.others.items()], most=MOST_LISTED)}): set "
            "plan.linears to None."
        )
    for path in choice.chosen:
        name = join(path, "weight")
        if name in layouts:
            _require_multiples(layouts[name], "tp", f"the weight of {path}", recipe)
            _require_own_features(layouts[name], path, recipe)
    for path in choice.experts:
        for name in ("gate_up_proj", "down_proj"):
            if (layout := layouts.get(join(path, name))) is not None:  # else another layer's
                _require_multiples(layout, "etp", f"{name} of {path}", recipe)


def _require_multiples(layout: Layout, axis: str, weight: str, recipe: str) -> None:
    """Raise PlanError where a rank's part of a matrix, or of an expert's, has other sizes than CUDA takes."""
    local = layout.local_shape(dict.fromkeys(layout.axes, 0))
    if not is_multiple(*local[-2:]):
        raise PlanError(
            f"plan.linears is {recipe!r}, and {axis} cuts {weight} {list(layout.shape)} to {list(local)}, no "
            f"multiples of {MULTIPLE}: choose a smaller {axis}, or set plan.linears to None."
        )


def _require_own_features(layout: Layout, path: str, recipe: str) -> None:
    """Raise PlanError where several ranks of `tp` hold the same features of a linear."""
    placement = layout.axis_placements.get("tp")
    if isinstance(placement, Shard) and placement.copies > 1:
        raise PlanError(
            f"plan.linears is {recipe!r}, and {placement.copies} ranks of tp hold the same features of "
            f"{path}, each with a summand of their gradient, which float8 would round before the sum: "
            "choose a tp that divides the heads of keys and values, or set plan.linears to None."
        )


def refuse_other_readers(layer: NamedLayer, weights: Collection[str], value: Value, length: int) -> None:
    """Raise ModelError where `layer` reads one of `weights` outside of the linear that has it.

    `weights`: names, in the layer, of those that it gets in 8 bits, without their scale. `layer` is on the
    meta device, and is changed: give a copy. `value` and `length`: as to `NamedLayer.run`.
    """
    linears = {name: layer.module.get_submodule(name.rpartition(".")[0]) for name in weights}
    reads = _OtherReads(linears)
    for module in dict.fromkeys(linears.values()):
        module.forward = partial(reads.linears.run, module.forward)
    try:
        with torch.device("meta"), torch.enable_grad(), reads:
            layer.run(map_tensors(Tensor.clone, value), length)
    except Exception:  # it has run before, when its operations were not followed
        return
    for name, operation in reads.found.items():
        raise ModelError(
            f"layer {layer.path!r} reads {join(layer.path, name)} by {operation}, outside of its linear, "
            "but with plan.linears = 'float8' it is in 8 bits there, without its scale: call the linear in "
            "place of that, or set plan.linears to 'float8-rowwise', whose weights stay in the precision."
        )


class RunningLinears:
    """Runs the forwards of linears, and knows whether one of them is running."""

    def __init__(self) -> None:
        self.running = 0

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the forward of a linear, and return its output."""
        self.running += 1
        try:
            return forward(*args, **kwargs)
        finally:
            self.running -= 1


class _OtherReads(TorchFunctionMode):
    """Records operations that read the weight of a linear outside of a linear's forward."""

    def __init__(self, linears: Mapping[str, Any]) -> None:
        """`linears`: the modules whose weights are in float8, by the name of the weight."""
        super().__init__()
        self._names = {id(module.weight): name for name, module in linears.items()}
        self.linears = RunningLinears()
        self.found: dict[str, str] = {}
        """The operation by the name of the weight."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation, and record it if it reads such a weight."""
        kwargs = kwargs or {}
        if not self.linears.running:
            name = func.__name__
            name = getattr(func.__self__, "__name__", name) if name == "__get__" else name
            read = [self._names[id(one)] for one in (*args, *kwargs.values()) if id(one) in self._names]
            if name not in FREE_OF_VALUES:
                self.found |= dict.fromkeys(read, name)
        return func(*args, **kwargs)
