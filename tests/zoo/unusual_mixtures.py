"""Unusual mixtures of experts and layouts of them that are right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from plait.plan.plan import Plan
from plait.tensor.experts import router as routers
from plait.verification.candidate.routing_checker import RoutingChecker
from zoo import float8_experts, sparse
from zoo.patching import rank
from zoo.sparse import Sparse, balanced, of
from zoo.unusual import BF16, EXACT, NATIVE, RESUMED, Right

LONELY = partial(Sparse, 5, 1)
TWO = Plan(dp=2, ep=2, microbatches=2)
FLOAT8: dict[str, Any] = {"linears": "float8"}
CUT = Plan(dp=2, etp=2, microbatches=2, linears="float8-rowwise-gw")
DIVIDED_MIXTURES = (
    Right("one expert of each token", of(LONELY, LONELY, name="one"), TWO),
    Right("more ranks than experts", of(partial(Sparse, 3, 2), name="few"), Plan(dp=4, ep=4)),
    Right(
        "one expert on two ranks", of(partial(Sparse, 1, 1), name="lonely"), Plan(dp=2, ep=2, strategy="full")
    ),
    Right("all experts of each token", of(partial(Sparse, 4, 4), name="all"), replace(TWO, recompute="full")),
    Right("prime experts", of(partial(Sparse, 7, 3), name="prime"), Plan(dp=2, tp=2, ep=4, microbatches=2)),
    Right("most experts idle", sparse.MANY, replace(TWO, strategy="optimizer")),
    Right("ties", sparse.TIED, Plan(dp=2, ep=2, microbatches=2)),
    Right("groups", sparse.GROUPED, Plan(pp=2, dp=2, ep=2, microbatches=4, schedule="zb-h1")),
    Right("biases etp replicate", sparse.BIASED, Plan(dp=4, replicate=2, etp=2)),
    Right("shared", sparse.SHARED, Plan(tp=2, ep=2, microbatches=2)),
    Right("shared without ep", sparse.SHARED, Plan(tp=2, microbatches=2)),
    Right("losses of documents", sparse.BALANCED, Plan(dp=2, tp=2, ep=4, microbatches=2)),
    Right("losses of documents cp", sparse.BALANCED, Plan(cp=2, ep=2, microbatches=2, recompute="full")),
    Right("losses of the step", sparse.OF_THE_STEP, Plan(pp=2, dp=2, ep=2, microbatches=2, schedule="gpipe")),
    Right("coupled losses", sparse.COUPLED, Plan(dp=2, ep=2)),
    Right("losses of the step before", sparse.PREVIOUS, replace(TWO, strategy="full")),
    Right("corrected biases", sparse.LEARNING, replace(TWO, recompute="full"), replace(RESUMED, steps=3)),
    Right(
        "coefficients of documents without padding",
        balanced(sparse.draw, weight=0.1, coupled=True),
        Plan(tp=2, dp=2, ep=2, microbatches=2, sequence_parallel="keep"),
    ),
    Right("divided experts fp32", sparse.FIVE, replace(TWO, precision="fp32"), NATIVE),
    Right("divided experts bf16", sparse.FIVE, replace(TWO, **BF16), NATIVE),
    Right("experts in float8 exact", float8_experts.FOUR_EXPERTS, replace(CUT, dp=4, ep=2), EXACT),
    Right("experts in float8 as in GPT-OSS", float8_experts.GPT_OSS, CUT),
    Right("experts in float8 with weights first", float8_experts.WEIGHTS_FIRST, replace(CUT, tp=2)),
    Right("experts in float8 without tokens", float8_experts.MANY_EXPERTS, replace(CUT, recompute="full")),
    Right("experts in float8 with adapters", float8_experts.ADAPTED_EXPERTS, CUT),
    Right("ranks without experts in float8", float8_experts.FOUR_EXPERTS, replace(TWO, dp=4, ep=4, **FLOAT8)),
    Right("experts in float8 bf16", float8_experts.FOUR_EXPERTS, replace(CUT, **BF16), NATIVE),
)


@contextmanager
def scores_rounded_otherwise_on_one_rank() -> Iterator[None]:
    """The logits of rank 1 are off by less than rounding explains, others for each expert."""
    original = routers.wide_linear

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        logits = original(input, weight, bias)
        tiny = 2e-16 * torch.arange(logits.shape[-1], dtype=logits.dtype, device=logits.device)
        return logits + tiny if rank() == 1 else logits

    with patch.object(routers, "wide_linear", linear):
        yield


@contextmanager
def scores_rounded_otherwise_and_not_replayed() -> Iterator[None]:
    """Likewise, and verification does not give rank 1 the experts of the reference."""
    with (
        scores_rounded_otherwise_on_one_rank(),
        patch.object(RoutingChecker, "_has_near", lambda *_: False),
    ):
        yield
