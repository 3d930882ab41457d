"""Mistakes in code that both runs would share: attention, documents, positions, rotary angles, layers.

They are entered on every rank, so the reference run has them as well where it does not compute by definition.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional

import plait
from parity import huggingface_cases
from parity.case import Case
from parity.cases import GPT2_VOCAB, draw_contexts, llama, with_values
from parity.contexts import HIDDEN, MLP, WIDTH, Start, mixing, packed
from plait.engine import local_batch
from plait.models import rotary
from plait.models.huggingface import common
from plait.models.huggingface import families as decoder
from plait.plan.plan import Plan
from plait.tensor.attention import block_attention, key_exchange_plan, visible_keys
from plait.tensor.running_sequence import ContextParallelism, DocumentBounds, LocalSequence
from plait.verification.step_location import StepPhase
from zoo import cases
from zoo.context import IN_A_WINDOW, PACKED, RING
from zoo.patching import rank
from zoo.row import TWO_STEPS, Named, Row

ATTENTION = import_module("plait.tensor.attention.attention")  # the package has a function of this name
LLAMA_LAYERS = import_module("plait.models.llama")
ONE_RANK = Plan(microbatches=2)


class Capped(nn.Module):
    """Attention with capped scores and a scale of its own, in a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        heads = (
            linear(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        result: Tensor = x + plait.attention(*heads, scale=0.7, softcap=0.9).transpose(1, 2).flatten(2)
        return result


@cache
def capped() -> Case:
    """A user's model with capped scores."""

    def build() -> nn.Module:
        return nn.Sequential(Start(), Capped(), MLP(), nn.Linear(HIDDEN, GPT2_VOCAB))

    return Case("capped", with_values(build), draw_contexts(GPT2_VOCAB))


@contextmanager
def _seen(change: Any) -> Iterator[None]:
    """Which keys a query sees is what `change` makes of the arguments that say so."""
    original = visible_keys.visible_range

    def visible_range(positions: Any, length: int, **given: Any) -> Any:
        return original(positions, length, **change(given))

    anew = key_exchange_plan.remembered_plan.__wrapped__
    with (
        patch.object(visible_keys, "visible_range", visible_range),
        patch.object(key_exchange_plan, "visible_range", visible_range),
        patch.object(key_exchange_plan, "remembered_plan", anew),
    ):
        yield


def window_one_too_wide() -> Any:
    """Every window is one position too wide, on one rank as well."""
    return _seen(lambda given: given | {"window": given["window"] and given["window"] + 1})


def documents_see_each_other() -> Any:
    """Attention passes from one document to the next."""
    return _seen(lambda given: given | {"documents": None})


def slope_of_the_cap_left_out() -> Any:
    """The backward of capped scores is that of plain ones."""
    original = block_attention._scores

    def scores(*given: Any, **more: Any) -> tuple[Tensor, Tensor | None]:
        found, slopes = original(*given, **more)
        return found, None if slopes is None else torch.ones_like(slopes)

    return patch.object(block_attention, "_scores", scores)


def scale_of_the_scores_squared() -> Any:
    """The scale is applied twice."""

    def scaling(scale: float, softcap: float | None = None) -> block_attention.Scaling:
        return block_attention.Scaling(scale * scale, softcap)

    return patch.object(ATTENTION, "Scaling", scaling)


def heads_share_in_turns() -> Any:
    """Query head h reads the key head h modulo their number, not those in a row."""

    def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        key, value = (one.repeat(1, query.shape[1] // one.shape[1], 1, 1) for one in (key, value))
        return functional.scaled_dot_product_attention(query, key, value, **options)

    return patch.object(ATTENTION, "grouped_attention", attend)


def documents_begin_one_later() -> Any:
    """The first token of a document counts to the one before."""
    original = local_batch.document_bounds
    return patch.object(
        local_batch, "document_bounds", lambda ids: original(torch.cat([ids[:, :1], ids[:, :-1]], 1))
    )


def positions_of_the_row() -> Any:
    """Positions do not begin anew in a document."""
    return patch.object(LocalSequence, "_positions", lambda self: self.indices)


def neighbours_are_rotated() -> Any:
    """Rotary angles turn pairs of neighbours, as in the paper, and not the two halves."""

    def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        one, other = x[..., ::2], x[..., 1::2]
        turned = one * cosines - other * sines, other * cosines + one * sines
        return torch.stack(turned, -1).flatten(-2).to(x.dtype)

    return patch.object(LLAMA_LAYERS, "rotate", rotate)


def base_doubled() -> Any:
    """The base of the rotary frequencies is another."""
    original = LLAMA_LAYERS.rotary_angles
    return patch.object(
        LLAMA_LAYERS, "rotary_angles", lambda n, size, base, *more: original(n, size, 2 * base, *more)
    )


def _turned_by(change: Any) -> Any:
    """The rotary module of a model of transformers is changed before it runs."""
    original = common.Rotary.forward

    def forward(self: Any, like: Tensor) -> Any:
        change(self)
        return original(self, like)

    return patch.object(common.Rotary, "forward", forward)


def scaling_of_the_angles_left_out() -> Any:
    """Cosines and sines are not multiplied by the factor of YaRN."""
    return _turned_by(lambda module: setattr(module, "scaling", 1.0))


def frequencies_of_the_plain_embedding() -> Any:
    """A scaling of the frequencies is not applied: here to the slowest of two."""

    def change(module: Any) -> None:
        exponents = torch.arange(len(module.bits), device=module.bits.device) / len(module.bits)
        module.bits = (LLAMA3["rope_theta"] ** -exponents).float().view(torch.int32)

    return _turned_by(change)


@contextmanager
def angles_of_the_first_documents() -> Iterator[None]:
    """Rotary angles are kept by their shape, whatever the documents."""
    original, kept = rotary.angles_of_positions, dict[Any, Any]()

    def angles(key: Any, compute: Any, length: int, dtype: Any, like: Tensor, cache: Any) -> Any:
        found = original(key, compute, length, dtype, like, cache)
        shape = rank(), *found[0].shape
        return found if like.is_meta else kept.setdefault(shape, found)

    with patch.object(rotary, "angles_of_positions", angles):
        yield


@contextmanager
def documents_of_the_first_micro_batch() -> Iterator[None]:
    """Document bounds are kept by the number of rows."""
    original, kept = ContextParallelism.sequence, dict[Any, Any]()

    def sequence(
        self: ContextParallelism, length: int, documents: DocumentBounds | None = None
    ) -> LocalSequence:
        if documents is not None:
            documents = kept.setdefault((rank(), len(documents.starts)), documents)
        return original(self, length, documents)

    with patch.object(ContextParallelism, "sequence", sequence):
        yield


def cap_of_the_logits_left_out() -> Any:
    """A head of transformers' models does not cap its logits."""
    return patch.object(
        common.Head, "forward", lambda self, x: self.lm_head(self.get_submodule(self.name)(x))
    )


def window_on_all_layers() -> Any:
    """Layers with full attention have the window of the others."""
    original = decoder.Attention.forward

    def forward(self: Any, x: Tensor) -> Tensor:
        self.window = self.self_attn.config.sliding_window
        return original(self, x)

    return patch.object(decoder.Attention, "forward", forward)


def _row(
    defect: Any,
    layer: str,
    cause: str = "",
    *,
    model: Case = PACKED,
    plan: Plan = ONE_RANK,
    phase: StepPhase = StepPhase.FORWARD,
    microbatch: int = 0,
    full: bool = False,
) -> Row:
    named = Named(phase=phase, layer=layer, cause=cause, microbatch=microbatch)
    return Row(
        defect=defect, model=model, plan=plan, named=named, full=full, options=replace(TWO_STEPS, steps=1)
    )


def _of_transformers(name: str, **more: Any) -> Case:
    return huggingface_cases.case(f"{name}-{more}", partial(getattr(huggingface_cases, name), **more))


LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 4,
}
SMOOTH = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
STALE = "documents of micro-batch 0"
DEFINITIONS = (
    _row(window_one_too_wide, "1", "a window of 4 instead of 3", model=IN_A_WINDOW),
    _row(scale_of_the_scores_squared, "1", "wrong scores", model=capped(), full=True),
    _row(heads_share_in_turns, cases.ATTENTION, "inside", model=llama(layers=1, heads=4, kv_heads=2)),
    _row(documents_see_each_other, cases.ATTENTION, "mask is that for each row as one document", full=True),
    _row(documents_begin_one_later, cases.ATTENTION, "wrong mask"),
    _row(positions_of_the_row, "0", "each row as one document", model=packed(mixing(8), 8), full=True),
    _row(neighbours_are_rotated, cases.ATTENTION, "rotary angles", model=cases.LLAMA, full=True),
    _row(documents_of_the_first_micro_batch, cases.ATTENTION, f"gives for the {STALE}", microbatch=1),
    _row(base_doubled, cases.ATTENTION, "rotary angles", model=cases.LLAMA, full=True),
    _row(angles_of_the_first_documents, cases.ATTENTION, f"angles. are those for the {STALE}", microbatch=1),
    _row(documents_of_the_first_micro_batch, cases.ATTENTION, STALE, plan=RING, microbatch=1, full=True),
    _row(
        scaling_of_the_angles_left_out,
        cases.ATTENTION,
        "rotary angles",
        model=huggingface_cases.case("llama-scaled"),
    ),
    _row(
        frequencies_of_the_plain_embedding,
        cases.ATTENTION,
        "rotary angles",
        model=_of_transformers("llama", rope_parameters=LLAMA3 | SMOOTH),
        full=True,
    ),
    _row(
        window_on_all_layers,
        "blocks.1.attention",
        "wrong mask",
        model=huggingface_cases.case("gemma3"),
        full=True,
    ),
    _row(
        slope_of_the_cap_left_out, "1", "its backward is not", model=capped(), phase=StepPhase.INPUT_GRADIENT
    ),
    _row(
        cap_of_the_logits_left_out,
        "head",
        "",
        model=huggingface_cases.case("gemma3-capped-untied"),
        full=True,
    ),
)
