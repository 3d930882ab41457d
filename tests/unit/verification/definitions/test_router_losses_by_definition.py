"""The formulas of the losses of routers, by hand; the reference run calls none of the engine's own."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch

from parity.balanced import build
from plait.models.layers.layer_sequence import sequence_of
from plait.tensor.experts import balance, router, router_losses_of_step, routing
from plait.tensor.experts.balance import Balance
from plait.tensor.experts.routing import Routing
from plait.tensor.losses import cross_entropy
from plait.verification.definitions import router_losses
from plait.verification.expected_dtypes import NumberFormats
from plait.verification.options import VerifyOptions
from plait.verification.reference.reference_run import ReferenceRun
from plait.verification.reference.rounding_errors import Perturbation
from plait.verification.reference.start_values import unchanged

LOGITS = torch.tensor([[math.log(1.0), math.log(3.0)], [0.0, 0.0]], dtype=torch.float64)
"""Softmax: 1/4 and 3/4; 1/2 and 1/2."""
BOTH = torch.tensor([True, True])


def test_probabilities_are_the_softmax_or_sigmoids_over_their_sum() -> None:
    softmax = router_losses.probabilities_of(Routing(), LOGITS)
    torch.testing.assert_close(softmax.tolist(), [[0.25, 0.75], [0.5, 0.5]])
    sigmoids = router_losses.probabilities_of(Routing(scores="sigmoid"), LOGITS)  # 1/2 and 3/4
    torch.testing.assert_close(sigmoids.tolist(), [[0.4, 0.6], [0.5, 0.5]])


def test_balance_and_z_losses_are_those_of_the_papers() -> None:
    probabilities, load = LOGITS.softmax(-1), torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    assert float(router_losses.summed_balance_loss(probabilities, load, BOTH)) == pytest.approx(2 * 1.25)
    z = math.log(4) ** 2, math.log(2) ** 2
    assert float(router_losses.summed_z_loss(LOGITS, BOTH)) == pytest.approx(sum(z))
    assert float(router_losses.summed_z_loss(LOGITS, torch.tensor([True, False]))) == pytest.approx(z[0])
    assert float(router_losses.summed_z_loss(LOGITS.float() + 200, BOTH)) == pytest.approx(
        (200 + math.log(4)) ** 2 + (200 + math.log(2)) ** 2
    )


def test_corrections_raise_experts_with_less_than_the_mean() -> None:
    assert router_losses.correction_of(torch.tensor([5, 1, 3]), 0.5).tolist() == [-0.5, 0.5, 0.0]


@pytest.mark.parametrize("settings", [Balance(0.5, 0.1), Balance(0.5, bias_rate=0.1, counts="step")])
def test_the_reference_calls_no_formula_of_the_engine(settings: Balance) -> None:
    """Each of them is a failure here; so a mistake in one of them is in the engine's run alone."""

    def refuse(*given: Any, **options: Any) -> Any:
        raise AssertionError("a formula of the engine was called")

    model = build(settings)
    formats, options = NumberFormats(compute=torch.float64), VerifyOptions(steps=1)
    tokens = torch.arange(32).view(4, 8) % 11
    formulas = [
        *[(Routing, name) for name in ("scores_of", "choose", "weights", "probabilities")],
        *[(Routing, "uncorrected_choice"), (routing, "_largest"), (router, "wide_linear")],
        *[
            (place, name)
            for place in (balance, router_losses_of_step)
            for name in ("count_choices", "token_balance", "token_z", "corrected_bias")
        ],
    ]
    with ExitStack() as stack:
        for place, name in formulas:
            stack.enter_context(patch.object(place, name, refuse))
        run = ReferenceRun(
            *(sequence_of(model), cross_entropy, options, unchanged, formats),
            *(torch.device("cpu"), Perturbation(0), 0.1),
        )
        assert len(dict(run.run([(tokens, tokens)], 2))) > 3
