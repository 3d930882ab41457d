"""LoRA: low-rank adapters of frozen linears (Hu et al. 2021, "LoRA", arXiv:2106.09685).

    output = base(x) + alpha / rank · up(down(dropout(x)))      down: [rank, in], up: [out, rank]

Tensor parallelism follows from the rules of the model without adapters, by `rules_with_adapters`:

    the linear's rule              base     down          up
    column, behind an entrance     column   replicated    column
    column, no entrance            column   -             column
    row                            row      row           -

Adapters of experts are divided as the experts are, by `Plan(ep=…)`: see `plait.models.expert_lora`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from plait.errors import ModelError, PlanError, listed
from plait.models.expert_lora import (
    SUFFIX,
    ExpertLora,
    ExpertMatrices,
    expert_matrices,
    require_adaptable,
)
from plait.models.initial_values import Constant, Initial, initial_value
from plait.models.initial_values import Normal as NormalValues
from plait.models.layers.layer_sequence import NO_SHAPE, sequence_of
from plait.plan.argument_checks import require_instance, require_number, require_whole
from plait.plan.rules import Rule, Rules, join, match, piece, replicated
from plait.tensor.autograd.deferred_weight_gradients import is_transposed_linear
from plait.tensor.dropout import Dropout
from plait.tensor.find_module_hooks import weight_utility
from plait.tensor.named_layer import NamedLayer

Model = TypeVar("Model", bound=nn.Module)
Sizes = tuple[int, int]
_MOST_LISTED = 4


class LoraLinear(nn.Module):
    """A frozen linear with a trainable low-rank adapter: `base(x) + scale · up(down(dropout(x)))`.

    Maps `[..., in_features]` to `[..., out_features]`. `up` starts at zero, so that the output is that of
    `base`.
    """

    def __init__(
        self, base: nn.Module, *, rank: int, alpha: float, dropout: float = 0.0, parts: Sequence[int] = ()
    ) -> None:
        """`base`: an `nn.Linear`, or a `Conv1D` of transformers. `parts`: of each block, for the rules."""
        super().__init__()
        self.in_features, self.out_features = features_of(base)
        self.rank, self.alpha, self.scale = rank, alpha, alpha / rank
        for name, count in zip(_parts_names(len(parts)), parts, strict=True):
            setattr(self, name, count)  # read by the rules
        self.base = base
        like = {"device": self.weight.device, "dtype": self.weight.dtype}
        self.down = nn.Linear(self.in_features, rank, bias=False, **like)
        self.up = nn.Linear(rank, self.out_features, bias=False, **like)
        self.dropout = Dropout(dropout) if dropout > 0 else None
        self.train(base.training)

    @property
    def weight(self) -> nn.Parameter:
        """The weight of the frozen linear."""
        return cast(nn.Parameter, self.base.weight)

    @property
    def bias(self) -> nn.Parameter | None:
        """The bias of the frozen linear."""
        return cast(nn.Parameter | None, self.base.bias)

    @property
    def halves(self) -> dict[str, Tensor]:
        """Return the weights of `down` and `up` by their names."""
        return {"down.weight": self.down.weight, "up.weight": self.up.weight}

    def forward(self, input: Tensor) -> Tensor:
        """Return the output of the linear and its adapter."""
        dropped = input if self.dropout is None else self.dropout(input)
        # The base last: no backward needs its product, which recomputation then leaves out.
        update = self.up(self.down(dropped))
        return torch.add(self.base(input), update, alpha=self.scale)

    def initial_values(self) -> dict[str, Initial]:
        """Return the adapter's initial distributions: `down` normal with std 1/√(3 · in features), `up` zero.

        That is the standard deviation of the uniform distribution that peft has by default.
        """
        std = 1 / math.sqrt(3 * self.in_features)
        return {"down.weight": NormalValues(std), "up.weight": Constant(0.0)}

    def extra_repr(self) -> str:
        """Return the text that `print` shows in the parentheses."""
        return f"{self.in_features}, {self.out_features}, rank={self.rank}, alpha={self.alpha:g}"


def lora(
    model: Model,
    *,
    rank: int = 8,
    alpha: float = 16,
    targets: Iterable[str] | None = None,
    dropout: float = 0.0,
    seed: int = 0,
) -> Model:
    """Return `model` itself, with a trainable adapter on its linears and all other parameters frozen.

    Adapts each linear whose path fits one of `targets`, such as "blocks.*.attention.query", "*.mlp.*" or
    "q_proj": `*` stands for any characters, and a target may be the end of a path. Also the matrices of
    experts whose names fit, such as "experts.gate_up_proj", each expert by itself; these without dropout.
    None: all linears but those of the last layer, and no experts. Gives `model` the rules of its adapters in
    place of its own, `model.rules`. Adapters of a model on the meta device get values from `parallelize`,
    others here, by name and `seed`. Their dropouts are in training mode. Raises ModelError for sizes that
    make no adapter, and for targets that match nothing to adapt.
    """
    require_instance("the model", model, nn.Module, "give a torch.nn.Module", ModelError)
    if adapters_of(model):
        raise ModelError("the model has adapters already: give lora a model without any.")
    linears, experts = _targets(model, targets)
    adapt(model, linears, experts, rank=rank, alpha=alpha, dropout=dropout, seed=seed)
    for one in adapters_of(model).values():
        if one.dropout is not None:
            one.dropout.train()  # also of a model that was read from files, which is in evaluation mode
    return model


def adapt(
    model: nn.Module,
    chosen: Mapping[str, nn.Module],
    experts: Mapping[str, ExpertMatrices],
    *,
    rank: int,
    alpha: float,
    dropout: float = 0.0,
    seed: int = 0,
) -> None:
    """Add LoRA adapters to the linears `chosen` and to `experts`, and freeze all other parameters, in place.

    Both are given by path.
    """
    require_sizes(rank, alpha, dropout)
    require_adaptable(experts, dropout)
    weights = {path: one.weight for path, one in chosen.items()}
    _refuse_shared(model, {**weights, **{path: one.weight for path, one in experts.items()}})
    rules = getattr(model, "rules", None)
    paths = [name for name, _ in model.named_modules(remove_duplicate=False)]
    matched = match(rules, paths) if isinstance(rules, Mapping) else {}
    model.requires_grad_(False)
    made: dict[int, LoraLinear] = {}  # by `id`: a linear may occur in several places
    for path, linear in chosen.items():
        parent = model.get_submodule(path.rpartition(".")[0])
        if id(linear) not in made:
            parts = [int(attrgetter(name)(parent)) for name in _parts_of(matched.get(path))]
            made[id(linear)] = LoraLinear(linear, rank=rank, alpha=alpha, dropout=dropout, parts=parts)
        setattr(parent, path.rpartition(".")[2], made[id(linear)])
    for matrices in experts.values():
        matrices.adapt(rank, alpha)
    names = getattr(model, "huggingface_names", None)
    if names is not None:
        renamed = {_renamed(name, chosen): theirs for name, theirs in cast(Any, names).items()}
        model.huggingface_names = cast(Any, renamed)
    if isinstance(rules, Mapping):
        model.rules = cast(Any, rules_with_adapters(rules, model, paths, set(chosen), dropout > 0))
    halves = (half for one in adapters_of(model).values() for half in one.halves.values())
    if not all(half.is_meta for half in halves):
        copy_values(model, adapter_values(model, seed))


def adapters_of(model: nn.Module) -> dict[str, LoraLinear | ExpertLora]:
    """Return the adapted linears of `model`, and the adapters of experts, by path.

    One that occurs in several places has the path of the first.
    """
    return {path: one for path, one in model.named_modules() if isinstance(one, LoraLinear | ExpertLora)}


def refuse_adapted_output(last: NamedLayer, loss_rows: int) -> None:
    """Raise PlanError where the last linear of a model's `last` layer has an adapter.

    A loss in chunks of rows computes the logits of one linear, and its adapter is two more.
    """
    linears = [name for name, one in last.module.named_modules() if type(one) is nn.Linear]
    path = linears[-1].rpartition(".")[0] if linears else ""
    if isinstance(last.module.get_submodule(path), LoraLinear):
        raise PlanError(
            f"plan.loss_rows is {loss_rows}, but {join(last.path, path)} has a LoRA adapter, whose output is "
            "added to the linear's, and a loss in chunks of rows computes one linear: leave it out of the "
            "targets of plait.lora, or set loss_rows to None."
        )


def adapted_weight(path: str, one: LoraLinear | ExpertLora) -> str:
    """Return the name, in the model without adapters, of the weight of the adapter at `path`."""
    return path.removesuffix(SUFFIX) if isinstance(one, ExpertLora) else f"{path}.weight"


def adapter_values(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """Return the initial values of the adapters of `model`, drawn by name and `seed` only."""
    return {
        f"{path}.{half}": initial_value(_on_meta(one), path, half, seed)
        for path, one in adapters_of(model).items()
        for half in one.halves
    }


@torch.no_grad()
def copy_values(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copy values, by name, into the parameters of `model` that are not on the meta device."""
    for name, value in values.items():
        parameter = model.get_parameter(name)
        if not parameter.is_meta:
            parameter.copy_(value)


@torch.no_grad()
def merged_values(model: nn.Module, values: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return a state dict of the model without adapters: each is added to the weight that it adapts.

    `values` are those of the adapted `model`, such as `engine.state_dict()`; None: its own.
    """
    merged: dict[str, Tensor] = dict(model.state_dict() if values is None else values)
    for path, one in model.named_modules(remove_duplicate=False):
        if not isinstance(one, LoraLinear | ExpertLora):
            continue
        down, up = (merged.pop(f"{path}.{half}") for half in one.halves)
        for name in [name for name in merged if name.startswith(f"{path}.base.")]:
            merged[f"{path}.{name.rpartition('.')[2]}"] = merged.pop(name)
        weight = adapted_weight(path, one)
        merged[weight] = weight_with_adapter(merged[weight], down, up, one.scale, is_transposed(one))
    return merged


def is_transposed(one: LoraLinear | ExpertLora) -> bool:
    """Return whether the weight that an adapter is added to is `[…, in, out]`."""
    return one.transposed if isinstance(one, ExpertLora) else is_transposed_linear(one.base)


def weight_with_adapter(weight: Tensor, down: Tensor, up: Tensor, scale: float, transposed: bool) -> Tensor:
    """Return `weight + scale · up @ down` in the dtype of `weight`, `[…, in, out]` if `transposed`."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    product = up.to(wide) @ down.to(wide)
    return weight.to(wide).add(product.mT if transposed else product, alpha=scale).to(weight.dtype)


def rules_with_adapters(
    rules: Rules, model: nn.Module, paths: Iterable[str], adapted: set[str], drops: bool
) -> Rules:
    """Return the tensor-parallel rules of `model` with adapters on the linears at the paths `adapted`.

    `rules` and `paths` are those of the model without adapters. `drops`: whether adapters have a dropout.
    """
    known = list(paths)
    layers = [layer.path for layer in sequence_of(model).layers]
    entered = {_layer(path, layers) for path, rule in match(rules, known).items() if rule.kind == "entrance"}
    found: dict[str, Rule] = {}
    for pattern, rule in rules.items():
        matched = list(match({pattern: rule}, known))
        if not adapted.intersection(matched):
            found[pattern] = rule
            continue
        of_path = {
            path: _split(rule, _layer(path, layers) in entered, drops) if path in adapted else {"": rule}
            for path in matched
        }
        each = list(of_path.values())
        if all(one == each[0] for one in each):
            of_path = {pattern: each[0]}
        found |= {join(path, name): one for path, split in of_path.items() for name, one in split.items()}
    return found


def _split(rule: Rule, entered: bool, drops: bool) -> dict[str, Rule]:
    """Return the rules of an adapted linear's modules; `entered`: whether its layer has an entrance."""
    names = _parts_names(len(_parts_of(rule)))
    own = rule if rule.parts is None else replace(rule, parts=names[0], interleaved=1)
    own = replace(own, blocks=names) if isinstance(rule.blocks, tuple) else own
    if rule.kind == "row":
        of_dropout = {"dropout": piece} if drops and rule.input_is_parallel else {}
        return {"base": own, "down": own, **of_dropout}
    if rule.kind not in ("column", "vocabulary"):
        return {"": rule}
    whole = ("down", "dropout") if drops else ("down",)
    return {"base": own, "up": own} | (dict.fromkeys(whole, replicated) if entered else {})


def _layer(path: str, layers: Iterable[str]) -> str:
    """Return the path of the layer that the module at `path` is in."""
    return next(layer for layer in layers if not layer or path == layer or path.startswith(f"{layer}."))


def require_sizes(rank: object, alpha: object, dropout: object) -> None:
    """Raise ModelError unless an adapter can have this rank, alpha and dropout."""
    require_whole("the rank of an adapter", rank, ModelError)
    require_number("the alpha of an adapter", alpha, ModelError, positive=True)
    require_number("the dropout of an adapter", dropout, ModelError)
    if not (isinstance(dropout, int | float) and dropout < 1):
        raise ModelError(f"an adapter has dropout = {dropout!r}: give a probability from 0, and below 1.")


def _targets(
    model: nn.Module, targets: Iterable[str] | None
) -> tuple[dict[str, nn.Module], dict[str, ExpertMatrices]]:
    """Return the linears and the experts' matrices to adapt, by path. ModelError if a target matches none."""
    modules = dict(model.named_modules(remove_duplicate=False))
    linears = {path: one for path, one in modules.items() if path and (is_linear(one) or _is_unready(one))}
    experts = expert_matrices(model)
    if isinstance(targets, str):
        targets = (targets,)
    if targets is not None:
        require_instance("targets of lora", targets, Iterable, "give the paths of linears", ModelError)
    if targets is None:
        last = sequence_of(model).layers[-1].path
        chosen = {path for path in linears if not last or not f"{path}.".startswith(f"{last}.")}
        if not chosen:
            raise ModelError("the model has no linear before its last layer to adapt: give targets.")
    elif not (targets := tuple(targets)):
        raise ModelError("lora has no targets: name linears, or give None for all but those of the head.")
    else:
        chosen = set()
        for target in targets:
            require_instance("a target of lora", target, str, "give the paths of linears", ModelError)
            fitting = {path for path in (*linears, *experts) if _fits(path, target)}
            if not fitting:
                raise ModelError(_matches_none(target, (*linears, *experts), modules))
            chosen |= fitting
    found = {path: linear for path, linear in linears.items() if path in chosen}
    for path, linear in found.items():
        _require_weight(path, linear)
    return found, {path: one for path, one in experts.items() if path in chosen}


def _is_unready(module: nn.Module) -> bool:
    """Return whether `module` is an `nn.Linear` without a shape yet, or with a computed weight."""
    return isinstance(module, nn.Linear) and (is_parametrized(module) or isinstance(module, LazyModuleMixin))


def _require_weight(path: str, linear: nn.Module) -> None:
    """Raise ModelError for a linear whose weight is no parameter with a shape, to which an adapter adds."""
    if utility := weight_utility(linear):
        raise ModelError(
            f"the weight of {path} is computed by {utility} in each forward, and an adapter is added to a "
            "weight that is a parameter: remove that, or name targets without it."
        )
    if isinstance(linear, LazyModuleMixin):
        raise ModelError(f"{path}.weight {NO_SHAPE}.")


def _fits(path: str, target: str) -> bool:
    return fnmatchcase(path, target) or fnmatchcase(path, f"*.{target}")


def _matches_none(target: str, linears: Iterable[str], modules: Mapping[str, nn.Module]) -> str:
    others = sorted({type(one).__name__ for path, one in modules.items() if path and _fits(path, target)})
    if others:
        return (
            f"the target {target!r} of lora matches no linear, but {listed(others)}: name the linears in it, "
            f"such as {target + '.*'!r}."
        )
    names = list(dict.fromkeys(path.rpartition(".")[2] for path in linears))
    near = get_close_matches(target.rpartition(".")[2], names, n=_MOST_LISTED) or names[:_MOST_LISTED]
    return (
        f"the target {target!r} of lora matches no module of the model: name linears, such as "
        f"{listed(near, between=', ')}."
        if near
        else f"the target {target!r} of lora matches nothing: the model has no linear."
    )


def _refuse_shared(model: nn.Module, chosen: Mapping[str, Any]) -> None:
    """Raise ModelError where one of the weights `chosen` is another module's too, as a tied head's is."""
    holders: dict[int, set[int]] = {}
    for module in model.modules():
        for one in module.parameters(recurse=False):
            holders.setdefault(id(one), set()).add(id(module))
    for path, weight in chosen.items():
        if len(holders[id(weight)]) > 1:
            raise ModelError(
                f"{path} shares its weight with another module, into which an adapter cannot be merged: "
                "leave it out of lora's targets."
            )


def is_linear(module: nn.Module) -> bool:
    """Return whether `module` is exactly an `nn.Linear`, or a `Conv1D` of transformers."""
    return type(module) is nn.Linear or is_transposed_linear(module)


def features_of(linear: nn.Module) -> Sizes:
    """Return the input and output features of a linear."""
    rows, columns = cast(Tensor, linear.weight).shape
    return (rows, columns) if is_transposed_linear(linear) else (columns, rows)


def _parts_of(rule: Rule | None) -> tuple[str, ...]:
    """Return the attributes of a linear's parent that hold the number of its parts (heads) or blocks."""
    if rule is None:
        return ()
    return rule.blocks if isinstance(rule.blocks, tuple) else () if rule.parts is None else (rule.parts,)


def _parts_names(count: int) -> tuple[str, ...]:
    """Return the attributes with these numbers of a `LoraLinear`, the new parent of the linear."""
    return tuple(f"parts_{number}" for number in range(count))


def _on_meta(one: LoraLinear | ExpertLora) -> LoraLinear | ExpertLora:
    if isinstance(one, ExpertLora):
        return copy.deepcopy(one).to("meta")
    with torch.device("meta"):
        base = nn.Linear(one.in_features, one.out_features, dtype=one.weight.dtype)
        return LoraLinear(base, rank=one.rank, alpha=one.alpha)


def _renamed(name: str, adapted: Mapping[str, nn.Module]) -> str:
    path, _, attribute = name.rpartition(".")
    return f"{path}.base.{attribute}" if path in adapted else name
