"""Mistakes of attention with sinks, and of latent attention, whose keys are wider than its values."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

from parity import huggingface_cases
from parity.case import Case
from plait.models.huggingface.latent_attention import LatentAttention
from plait.models.rotary import Angles, rotate
from plait.plan.plan import Plan
from plait.tensor.attention import fused_kernels, ring
from plait.verification.step_location import StepPhase
from zoo import cases
from zoo.row import Named, Row

ATTENTION = import_module("plait.tensor.attention.attention")  # the package has a function of this name


def sinks_weigh_nothing_in_the_backward() -> Any:
    """The log-sum-exp that the backward takes is that of the keys alone."""

    def merge_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
        out.mul_(torch.sigmoid(lse - sinks[:, None]).unsqueeze(-1))

    return patch.object(ring, "merge_sinks", merge_sinks)


def gradient_of_sinks_lost() -> Any:
    """Sinks are not trained."""

    def sinks_gradient(gradient: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor | None:
        return None if sinks is None else torch.zeros_like(sinks)

    return patch.object(ring, "sinks_gradient", sinks_gradient)


def sinks_of_other_heads() -> Any:
    """A rank that has some heads for all positions takes their sinks in another order."""
    original = ATTENTION.attend_by_heads

    def attend_by_heads(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, *more: Any) -> Any:
        return original(query, key, value, sinks.flip(0), *more)

    return patch.object(ATTENTION, "attend_by_heads", attend_by_heads)


def sinks_added_for_each_block_of_keys() -> Any:
    """Each block of keys gets the sinks, of which there is one a head."""
    original = ring.merge

    def merge(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
        original(out, lse, part_out, part_lse)
        ring.merge_sinks(out, lse, torch.zeros_like(lse[0, :, 0]))

    return patch.object(ring, "merge", merge)


def shared_part_of_keys_at_no_position() -> Any:
    """The part of keys that all heads share is not rotated."""
    original = LatentAttention._rotated

    def rotated(self: LatentAttention, x: Tensor, angles: Angles) -> Tensor:
        return x if x.shape[1] == 1 else original(self, x, angles)

    return patch.object(LatentAttention, "_rotated", rotated)


def halves_rotated_in_place_of_neighbours() -> Any:
    """Features are rotated in the pairs that other models have."""
    return patch.object(LatentAttention, "_rotated", lambda self, x, angles: rotate(x, *angles))


def zeros_before_the_values() -> Any:
    """What makes values as wide as keys stands in front of them, and what is cut off behind."""

    def as_wide(tensor: Tensor, key: Tensor) -> Tensor:
        return functional.pad(tensor, (key.shape[3] - tensor.shape[3], 0))

    return patch.object(fused_kernels, "_as_wide", as_wide)


GPT_OSS = huggingface_cases.case("gpt-oss", partial(huggingface_cases.gpt_oss, num_hidden_layers=1))
DEEPSEEK = huggingface_cases.case("deepseek-v3", partial(huggingface_cases.deepseek_v3, num_hidden_layers=1))
RING = Plan(cp=2, microbatches=2, context_parallel="ring")
HEADS = replace(RING, context_parallel="ulysses")


def _row(defect: Any, phase: StepPhase, model: Case, plan: Plan, **more: Any) -> Row:
    named = Named(phase=phase, layer=cases.ATTENTION, microbatch=0, ranks=(0, 1), **more)
    return Row(defect=defect, model=model, plan=plan, named=named)


SINKS_AND_LATENTS = (
    _row(sinks_weigh_nothing_in_the_backward, StepPhase.INPUT_GRADIENT, GPT_OSS, RING),
    _row(gradient_of_sinks_lost, StepPhase.WEIGHT_GRADIENT, GPT_OSS, cases.TWO_PARTS, parameter=r".*sinks"),
    _row(sinks_of_other_heads, StepPhase.FORWARD, GPT_OSS, HEADS),
    _row(sinks_added_for_each_block_of_keys, StepPhase.FORWARD, GPT_OSS, RING),
    _row(shared_part_of_keys_at_no_position, StepPhase.FORWARD, DEEPSEEK, cases.TWO_PARTS),
    _row(halves_rotated_in_place_of_neighbours, StepPhase.FORWARD, DEEPSEEK, RING),
    _row(zeros_before_the_values, StepPhase.FORWARD, DEEPSEEK, cases.TWO_PARTS),
)
