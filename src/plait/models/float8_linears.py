"""Which linears of a model `Plan.linears` chooses: all but those that decide more than they cost.

In 16 bits stay the model's last linear and those with the rule `vocabulary` (heads, whose rounding changes
each probability), linears whose weight is another module's too (an embedding's), adapters of LoRA, modules
with the rules `replicated` and `partitioned`, those with hooks or a forward of their own, and those with
sizes that are no multiple of 16. Routers are no linears.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from plait.errors import PlanError, listed
from plait.models.lora import LoraLinear
from plait.plan.layout.layout import Layout, Shard
from plait.plan.rules import Rule, join
from plait.tensor.autograd.deferred_weight_gradients import is_transposed_linear
from plait.tensor.call_hooks import is_altered
from plait.tensor.experts.expert_layouts import experts_in
from plait.tensor.float8.scaled_product import MULTIPLE, is_multiple
from plait.tensor.layer_values import NamedLayer

OTHER_RULES = {"vocabulary": "head", "replicated": "replicated", "partitioned": "partitioned"}
"""By rule why a linear stays as it is."""
MOST_LISTED = 3
"""Paths that a sentence lists for each reason."""


@dataclass(frozen=True)
class LinearChoice:
    """The linears of a model that multiply in float8, and the others."""

    chosen: tuple[str, ...]
    """Paths, in the order of the model."""
    others: Mapping[str, str]
    """Why each of the other linears stays as it is, by path."""

    def line(self, recipe: str) -> str:
        """Return a sentence on which linears multiply in float8, and why others do not."""
        alike: dict[str, list[str]] = {}
        for path, why in self.others.items():
            alike.setdefault(why, []).append(path)
        rest = "; ".join(f"{listed(paths, most=MOST_LISTED)} ({why})" for why, paths in alike.items())
        others = f"; the others stay in the run's precision: {rest}" if rest else ""
        return f"Linears: {len(self.chosen)} multiply in {recipe}{others}."

    def within(self, layer: str) -> tuple[str, ...]:
        """Return the names, in the layer of that path, of its linears that multiply in float8."""
        start = f"{layer}." if layer else ""
        return tuple(
            path.removeprefix(start) for path in self.chosen if path == layer or path.startswith(start)
        )


NO_LINEARS = LinearChoice((), {})
"""Without `Plan.linears`."""


def choose_linears(layers: Sequence[NamedLayer], rules: Mapping[str, Rule]) -> LinearChoice:
    """Return which linears multiply in float8; `rules`: those of the model's modules by path."""
    linears = {
        join(layer.path, name): module
        for layer in layers
        for name, module in layer.module.named_modules(remove_duplicate=False)
        if type(module) is nn.Linear or is_transposed_linear(module)
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
        elif is_altered(module):
            others[path] = "hooks"
        elif not is_multiple(*module.weight.shape):
            others[path] = "sizes"
        else:
            chosen.append(path)
    for layer in layers:
        others |= {join(layer.path, name): "experts" for name, _ in experts_in(layer.module)}
    return LinearChoice(tuple(chosen), others)


def _users_of_weights(layers: Sequence[NamedLayer]) -> Counter[int]:
    """Return in how many modules each parameter is."""
    modules = {id(module): module for layer in layers for module in layer.module.modules()}
    return Counter(
        id(parameter) for module in modules.values() for parameter in module.parameters(recurse=False)
    )


def require_multipliable(choice: LinearChoice, layouts: Mapping[str, Layout], recipe: str) -> None:
    """Raise PlanError where no linear is chosen, or `tp` cuts a chosen one so that it cannot be multiplied.

    `layouts`: of the parameters, by name.
    """
    if not choice.chosen:
        raise PlanError(
            f"plan.linears is {recipe!r}, but no linear of the model can multiply in float8 "
            f"({listed([f'{path}: {why}' for path, why in choice.others.items()], most=MOST_LISTED)}): set "
            "plan.linears to None."
        )
    for path in choice.chosen:
        name = join(path, "weight")
        if name not in layouts:
            continue
        layout = layouts[name]
        placement = layout.axis_placements.get("tp")
        local = layout.local_shape(dict.fromkeys(layout.axes, 0))
        if not is_multiple(*local):
            raise PlanError(
                f"plan.linears is {recipe!r}, and tp cuts the weight of {path} {list(layout.shape)} to "
                f"{list(local)}, no multiples of {MULTIPLE}: choose a smaller tp, or set plan.linears "
                "to None."
            )
        if isinstance(placement, Shard) and placement.copies > 1:
            raise PlanError(
                f"plan.linears is {recipe!r}, and {placement.copies} ranks of tp hold the same features of "
                f"{path}, each with a summand of their gradient, which float8 would round before the sum: "
                "choose a tp that divides the heads of keys and values, or set plan.linears to None."
            )
