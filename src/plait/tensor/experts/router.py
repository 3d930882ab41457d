"""`Router`: a linear whose outputs choose the experts of each token, and their weights.

Letters: T tokens, H hidden features, E experts, k experts of a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.errors import ModelError
from plait.plan.rules import join
from plait.tensor.autograd.eager_operations import TRACE, TensorForm
from plait.tensor.autograd.kept_results import computed_once, with_kept_operations
from plait.tensor.autograd.private_torch_functions import apply_function
from plait.tensor.dropout import LocatePart
from plait.tensor.experts.balance import Balance
from plait.tensor.experts.routing import Routing
from plait.tensor.experts.token_documents import without_padding
from plait.tensor.named_layer import NamedLayer

Choose = Callable[[Tensor], Tensor]
"""Returns experts `[T, k]` for scores `[T, E]`."""


class Router(nn.Module):
    """A linear that chooses experts: returns each token's logits, weights and experts.

    The `gate` modules of transformers return the same. Logits and scores have at least float32: in bfloat16
    4 to 7 % of tokens would tie with 64 experts. Of equal scores that of the lowest number is chosen. Under
    recomputation experts are chosen once.
    """

    keeps_dtype = frozenset({"e_score_correction_bias"})
    """Buffers that keep their own dtype whatever a run's precision is: corrections are small."""
    bias: nn.Parameter | None
    e_score_correction_bias: Tensor | None

    def __init__(
        self,
        hidden: int,
        experts: int,
        top_k: int,
        *,
        routing: Routing | None = None,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`routing`: how logits become weights; by default `Routing()`. `bias`: whether logits have one.

        Raises ModelError where the sizes do not fit.
        """
        super().__init__()
        self.top_k, self.routing = top_k, routing or Routing()
        self.routing.require_sizes(experts, top_k)
        self.weight = nn.Parameter(torch.empty(experts, hidden, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(experts, device=device, dtype=dtype)) if bias else None
        wide = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        correction = torch.zeros(experts, device=device, dtype=wide) if self.routing.corrected else None
        self.register_buffer("e_score_correction_bias", correction)
        self.balance = Balance()
        """How the load of the experts is kept even."""
        self.sequence_part: LocatePart | None = None
        """How to locate this rank's part of the positions, where its tokens are a part of the sequence."""
        self.attach_losses: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
        """Set by the engine: see `StepBalance.attach`."""
        self.given: Choose | None = None
        """Gives the experts, for a replay, or balanced for timings; None: those that `routing` chooses."""
        self.note: Callable[[Tensor, Tensor], None] | None = None
        """Called with the logits and the experts of each call, for a verification."""
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight as `nn.Linear` does; bias and correction are 0."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        for zeros in (self.bias, self.e_score_correction_bias):
            if zeros is not None:
                nn.init.zeros_(zeros)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits `[T, E]`, weights `[T, k]` like `hidden` `[T, H]`, and experts, int64 `[T, k]`.

        In an engine the experts of padding, tokens of a negative document id, are -1: none.
        """
        logits, trace = wide_linear(hidden, self.weight, self.bias), TRACE.get()
        if trace is None:
            return logits, *self.route(logits, hidden.dtype)
        shape = len(logits), self.top_k
        forms = [TensorForm.contiguous(shape, dtype) for dtype in (hidden.dtype, torch.int64)]
        weights, indices = trace.call(partial(_route, hidden.dtype), self, [logits], forms, once=True)
        return logits, weights, indices

    def route(self, logits: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return weights `[T, k]` in `dtype`, and experts int64 `[T, k]`, chosen by `logits [T, E]`.

        Calls `attach_losses`, which counts the choices, and `note`, where they are set.
        """
        scores = self.routing.scores_of(logits)
        indices = computed_once(lambda: self._choose(scores.detach()))
        weights = self.routing.weights(scores, indices)
        if self.attach_losses is not None:
            weights = self.attach_losses(logits, weights, indices)
        indices = without_padding(indices, self.sequence_part)
        if self.note is not None:
            self.note(logits, indices)
        return weights.to(dtype), indices

    def _choose(self, scores: Tensor) -> Tensor:
        """Return the experts of each token, chosen by their scores unless they are `given`."""
        if self.given is None:
            return self.routing.choose(scores, self.e_score_correction_bias, self.top_k)
        indices, expected = self.given(scores), [len(scores), self.top_k]
        if indices.dtype != torch.int64 or list(indices.shape) != expected:
            raise ModelError(
                f"a router was given experts as {indices.dtype} {list(indices.shape)}: give torch.int64 "
                f"{expected}, the numbers of the experts of each token."
            )
        return indices

    def extra_repr(self) -> str:
        """Return the text that `print` shows in the parentheses."""
        experts, hidden = self.weight.shape
        return f"{hidden}, {experts}, top_k={self.top_k}, {self.routing}"


@torch.enable_grad()
def _route(dtype: torch.dtype, router: Router, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return `router.route`, which counts choices, also of a router that does not learn."""
    return router.route(logits, dtype)


def wide_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `functional.linear` in float32 or wider, also under autocast; `input` is saved as it is.

    `input [T, H]`, `weight [E, H]`, `bias [E]`.
    """
    wide = torch.promote_types(input.dtype, torch.float32)
    with nullcontext() if input.is_meta else torch.autocast(input.device.type, enabled=False):
        if input.dtype == weight.dtype == wide:
            return with_kept_operations(partial(functional.linear, input, weight, bias))
        product: Tensor = with_kept_operations(partial(apply_function, _WideLinear, input, weight, wide))
        return product if bias is None else product + bias.to(wide)


class _WideLinear(torch.autograd.Function):
    """Autograd function of `x Wᵀ` in a wider dtype, which saves `x` in its own."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, wide: torch.dtype) -> Tensor:
        ctx.save_for_backward(input, weight)
        return input.to(wide) @ weight.to(wide).t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        input, weight = ctx.saved_tensors
        of_input = (gradient @ weight.to(gradient.dtype)).to(input.dtype) if ctx.needs_input_grad[0] else None
        of_weight = gradient.t() @ input.to(gradient.dtype) if ctx.needs_input_grad[1] else None
        return of_input, of_weight, None


def routers_of(layers: Iterable[NamedLayer]) -> dict[str, Router]:
    """Return the routers in `layers` by path in the model. Raises ModelError for one that is there twice."""
    found: dict[str, Router] = {}
    paths: dict[int, str] = {}
    for layer in layers:
        for name, module in layer.module.named_modules(remove_duplicate=False):
            if isinstance(module, Router):
                path = join(layer.path, name)
                if (first := paths.setdefault(id(module), path)) != path:
                    raise ModelError(
                        f"{first} and {path} are one router, whose load would be that of both layers: give "
                        "each layer a router of its own."
                    )
                found[path] = module
    return found
