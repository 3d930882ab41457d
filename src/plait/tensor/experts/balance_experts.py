"""`balance_experts`: sets how all routers of a model balance the load of their experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from plait.errors import ModelError
from plait.tensor.experts.balance import Counts
from plait.tensor.experts.router import Router


def balance_experts(
    model: nn.Module,
    *,
    weight: float | None = None,
    z_weight: float | None = None,
    bias_rate: float | None = None,
    counts: Counts | None = None,
    coupled: bool | None = None,
    forced_routing: bool | None = None,
) -> None:
    """Set how the routers of `model` keep the load of their experts even, before `parallelize` or `fit`.

    `weight`: factor of the balance loss of each layer, which an even load makes k, the experts of a token;
    `z_weight`: of the z-loss; `bias_rate`: by how much a step corrects the bias of routers that have one.
    `counts`: the tokens whose choices make the load: of each "document", of the whole "step", which the
    schedule gpipe or one micro-batch allows, or of the "previous" step. `coupled`: one load for all layers
    together, as in transformers. `forced_routing`: whether training steps send tokens to experts in turn,
    which loads all alike, whatever their scores are; weights come from the scores as always. It is for
    timings: the model learns another routing than it has in evaluation. None: as it is, at first no loss, no
    correction and no forced routing. Definitions, and the weights of others for the same losses:
    `plait.tensor.experts.balance`.

    Raises ModelError for a model without routers, for a rate where none has a bias, and for values out of
    range.
    """
    routers = [module for module in model.modules() if isinstance(module, Router)]
    if not routers:
        raise ModelError("balance_experts was given a model without routers: give one with MixtureOfExperts.")
    if bias_rate and all(router.e_score_correction_bias is None for router in routers):
        raise ModelError(
            f"bias_rate is {bias_rate}, but no router has a bias to correct: make the model with "
            "Routing(corrected=True), or leave bias_rate out."
        )
    given: dict[str, Any] = {"weight": weight, "z_weight": z_weight, "bias_rate": bias_rate}
    given |= {"counts": counts, "coupled": coupled, "forced_routing": forced_routing}
    changes = {name: value for name, value in given.items() if value is not None}
    for router in routers:
        router.balance = replace(router.balance, **changes)
