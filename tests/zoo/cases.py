"""Models and layouts in which mistakes are shown: as small as they can be."""

from __future__ import annotations

from dataclasses import replace

import torch

from parity.case import Batch
from parity.cases import SMOOTHED, gpt2, llama
from plait.plan.plan import Plan

ATTENTION, MLP = "blocks.0.attention", "blocks.0.mlp"
GPT2, LLAMA = gpt2(layers=1), llama(layers=1)
"""embedding, blocks.0.attention, blocks.0.mlp, head; the head's weight is the embedding's."""
UNTIED = gpt2(layers=1, tied=False)
FOUR_HEADS = gpt2(layers=1, heads=4)
EVEN = gpt2(layers=1, vocab=38)
"""Each of two ranks holds as many rows of the vocabulary."""
SHARING = llama(layers=1, kv_heads=1)
NARROW = gpt2(layers=1, hidden=12)
"""Rows of 12 elements: cuts, at multiples of 16, fall inside rows of the table, whose shards are one row."""
SMOOTH = replace(GPT2, loss=SMOOTHED)

TWO_STAGES = Plan(pp=2, microbatches=2, layers_per_stage=(2, 2))
"""Embedding and attention on rank 0, MLP and head on rank 1."""
TWO_STAGES_OF_THREE = replace(TWO_STAGES, microbatches=3)
"""Three micro-batches: what is off by a factor of two is not off by their number."""
FORWARD_FIRST = replace(TWO_STAGES, schedule="gpipe")
FORWARD_FIRST_OF_THREE = replace(FORWARD_FIRST, microbatches=3)
ZERO_BUBBLE = replace(TWO_STAGES, schedule="zb-h1", microbatches=3)
ANY_TWO_STAGES = replace(TWO_STAGES, layers_per_stage=None)
TWO_COPIES = Plan(dp=2, microbatches=2)
"""Micro-batches 0 and 1 of the global batch on rank 0, 2 and 3 on rank 1."""
TWO_COPIES_OF_THREE = replace(TWO_COPIES, microbatches=3)
CUT_STATE = replace(TWO_COPIES, strategy="optimizer")
CUT_STATE_OF_THREE = replace(CUT_STATE, microbatches=3)
CUT_GRADIENTS = replace(TWO_COPIES, strategy="gradients")
CUT_GRADIENTS_OF_THREE = replace(CUT_GRADIENTS, microbatches=3)
CUT_GRADIENTS_EACH = replace(CUT_GRADIENTS, reduce="each")
CUT_PARAMETERS = replace(TWO_COPIES, strategy="full")
CUT_PARAMETERS_EACH = replace(CUT_PARAMETERS, reduce="each")
VISITING = replace(CUT_PARAMETERS, offload="parameters")
"""Shards lie on the CPU while a step runs, and come to the device for the optimizer."""
CUT_STATE_AWAY = replace(CUT_STATE, offload="full")
CUT_GRADIENTS_AWAY = replace(CUT_GRADIENTS, offload="full")
HYBRID_STATE = replace(CUT_STATE, dp=4, replicate=2)
"""Ranks 0 and 1 hold the two shards, ranks 2 and 3 copies of them."""
HYBRID_GRADIENTS = replace(CUT_GRADIENTS, dp=4, replicate=2)
HYBRID_PARAMETERS = replace(CUT_PARAMETERS, dp=4, replicate=2)
STAGES_OF_CUT_PARAMETERS = replace(TWO_STAGES, dp=2, strategy="full")
TWO_PARTS = Plan(tp=2, microbatches=2)
TWO_PARTS_OF_THREE = replace(TWO_PARTS, microbatches=3)


def draw_uneven(rows: int, generator: torch.Generator) -> Batch:
    """The first target of each row does not count, and in the second half of the batch two more."""
    inputs, targets = GPT2.draw(rows, generator)
    targets[:, 0] = -100
    targets[rows // 2 :, 1:3] = -100
    return inputs, targets


UNEVEN = replace(GPT2, draw=draw_uneven)
