"""Unusual mixtures of experts and layouts of them that are right."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from plait.plan.plan import Plan
from zoo import sparse
from zoo.sparse import Sparse, balanced, of
from zoo.unusual import BF16, NATIVE, RESUMED, Right

LONELY = partial(Sparse, 5, 1)
TWO = Plan(dp=2, ep=2, microbatches=2)
MIXTURES = (
    Right("one expert of each token", of(LONELY, LONELY, name="one"), TWO),
    Right("more ranks than experts", of(partial(Sparse, 3, 2), name="few"), Plan(dp=4, ep=4)),
    Right("one expert", of(partial(Sparse, 1, 1), name="lonely"), Plan(dp=2, ep=2, strategy="full")),
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
    Right("experts fp32", sparse.FIVE, replace(TWO, precision="fp32"), NATIVE),
    Right("experts bf16", sparse.FIVE, replace(TWO, **BF16), NATIVE),
)
