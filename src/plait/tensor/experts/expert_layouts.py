"""The layouts of experts' parameters: whole experts over `ep`, the inner features of each over `etp`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import nn

from plait.errors import PlanError
from plait.plan.layout.layout import Layout, Placement, Shard
from plait.ranks.group import alone
from plait.tensor.experts.experts import ExpertRanks, Experts


def experts_in(layer: nn.Module) -> Iterator[tuple[str, Experts]]:
    """Yield the name in `layer` and the module of all its `Experts`, once per name."""
    for name, module in layer.named_modules(remove_duplicate=False):
        if isinstance(module, Experts):
            yield name, module


def expert_layouts(module: Experts, axes: Mapping[str, int], path: str) -> dict[str, Layout]:
    """Return the layout over `axes` of each parameter, also of adapters, by its name in the module.

    Without the axes `ep` and `etp` every rank holds all. The first ranks of `ep` hold one expert more where
    their number does not divide. Raises PlanError where `etp` does not divide the inner features, and where
    parameters are computed from others.
    """
    layouts = {}
    for name, parameter in module.named_parameters():
        placements: dict[str, Placement] = {}
        if "ep" in axes:
            placements["ep"] = Shard(0)
            _require_own(name, path, module)
            inner = module.inner_shards[name]
            if inner is not None:
                placements["etp"] = inner
                features = parameter.shape[inner.dim] // (
                    inner.blocks if isinstance(inner.blocks, int) else 1
                )
                if features % axes["etp"]:
                    raise PlanError(
                        f"plan.etp = {axes['etp']} does not divide the {features} inner features of the "
                        f"experts of {path}: choose a divisor."
                    )
        layouts[name] = Layout(parameter.shape, axes, placements)
    return layouts


def _require_own(name: str, path: str, module: Experts) -> None:
    """Raise PlanError for a parameter of experts of which a rank cannot hold a part."""
    if name not in module.inner_shards:
        raise PlanError(
            f"{path}.{name} is no parameter that experts have by themselves, such as one from which "
            "torch.nn.utils.parametrize computes another, and how to divide it is unknown: remove it, or set "
            "plan.ep and plan.etp to 1."
        )


def place_experts(layer: nn.Module, ranks: ExpertRanks | None, *, has_own_tokens: bool) -> None:
    """Set on each `Experts` in `layer` between which ranks its experts are divided; `ranks` None: do nothing.

    `has_own_tokens`: whether each rank of `ranks.tokens` gives the layer tokens of its own.
    """
    if ranks is None:
        return
    for _, module in experts_in(layer):
        module.ranks = replace(ranks, tokens=alone("tp")) if has_own_tokens else ranks
