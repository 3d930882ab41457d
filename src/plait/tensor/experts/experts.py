"""`Experts`: many MLPs with gates, of which each token runs through those that a router has chosen.

Letters: T tokens, H hidden features, E experts, F inner features of one expert, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import DataError, ModelError
from plait.plan.layout.layout import Shard, divide
from plait.ranks.group import Group
from plait.tensor.autograd.deferred_weight_gradients import defers
from plait.tensor.autograd.eager_operations import TRACE, TensorForm
from plait.tensor.autograd.kept_results import RECOMPUTED_RUN, computed_once, kept
from plait.tensor.autograd.paired_collectives import gather, split
from plait.tensor.autograd.regathered_activations import own_range
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue
from plait.tensor.experts.assignments import Assignments, assign
from plait.tensor.experts.expert_casts import ExpertCasts
from plait.tensor.experts.expert_products import ExpertCall, ExpertParameters, compute_experts
from plait.tensor.experts.gated_activation import GatedActivation
from plait.tensor.experts.low_rank import LowRank
from plait.tensor.experts.router import Router
from plait.tensor.experts.token_documents import has_padding
from plait.tensor.experts.token_exchange import TokenExchange, exchange_of, pack, unpack
from plait.tensor.find_module_hooks import is_altered
from plait.tensor.position_marks import keeps_positions_later

SILU = GatedActivation()


@dataclass(frozen=True)
class ExpertRanks:
    """Between which ranks a layer's experts are divided, and which ranks have the same tokens."""

    group: Group
    """Along `ep` × `etp`, row-major: ranks of `etp`, which hold parts of the same experts, are neighbours."""
    etp: int
    """How many ranks hold each expert, some of its inner features each."""
    tokens: Group
    """Ranks that give the same tokens to the layer, of which each sends a slice to the experts; the ranks of
    `tp`, or a group of one rank where each has tokens of its own."""
    takes_all: bool = False
    """Whether on meta all tokens are assumed to have the experts of this rank; else routing is uniform."""


class ExpertAdapter(nn.Module):
    """A low-rank adapter of one matrix of each expert, set as `experts.NAME_adapter`: see `plait.lora`.

    The matrix `[out, in]` of expert e is used as if `alpha / rank · up[e] down[e]` were added to it.
    """

    def __init__(self, matrices: Tensor, *, transposed: bool, rank: int, alpha: float) -> None:
        """`matrices`: the parameter `[E, out, in]`, or `[E, in, out]` if transposed."""
        super().__init__()
        experts, *sizes = matrices.shape
        outputs, inputs = sizes[::-1] if transposed else sizes
        self.transposed, self.rank, self.alpha, self.scale = transposed, rank, alpha, alpha / rank
        like: dict[str, Any] = {"device": matrices.device, "dtype": matrices.dtype}
        self.down = nn.Parameter(torch.empty(experts, rank, inputs, **like))
        self.up = nn.Parameter(torch.empty(experts, outputs, rank, **like))

    def extra_repr(self) -> str:
        """Return the text that `print` shows in the parentheses."""
        return f"{self.down.shape[2]}, {self.up.shape[1]}, rank={self.rank}, alpha={self.alpha:g}"


class Experts(nn.Module):
    """E MLPs with gates; returns for each token the weighted sum of the outputs of its experts.

    `gate_up_proj [E, 2F, H]` (all rows of the gate, then those of `up`) and `down_proj [E, H, F]`, as in
    transformers. Expert e computes `down_proj[e] (silu(gate) · up)`. First-order gradients only.
    """

    summed_over_etp = frozenset({"gate_up_proj_adapter.down", "down_proj_adapter.up"})
    """Parameters that each rank of `etp` has whole, and of whose gradients it computes a summand."""

    def __init__(
        self,
        hidden: int,
        inner: int,
        experts: int,
        *,
        bias: bool = False,
        activation: GatedActivation = SILU,
        transposed: bool = False,
        weights_first: bool = False,
        **factory: Any,
    ) -> None:
        """`transposed`: whether parameters are `[E, H, 2F]` and `[E, F, H]`, as GPT-OSS has them.

        `bias`: whether there are `gate_up_proj_bias [E, 2F]` and `down_proj_bias [E, H]`. `weights_first`:
        whether a token's weights multiply its experts' inputs in place of their outputs. `factory`: device
        and dtype of the parameters.
        """
        super().__init__()
        self.num_experts = experts
        self.activation, self.transposed, self.weights_first = activation, transposed, weights_first
        gate_up, down = (2 * inner, hidden), (hidden, inner)
        if transposed:
            gate_up, down = gate_up[::-1], down[::-1]
        self.gate_up_proj = nn.Parameter(torch.empty(experts, *gate_up, **factory))
        self.down_proj = nn.Parameter(torch.empty(experts, *down, **factory))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(experts, 2 * inner, **factory)) if bias else None
        self.down_proj_bias = nn.Parameter(torch.empty(experts, hidden, **factory)) if bias else None
        self.gate_up_proj_adapter: ExpertAdapter | None = None
        self.down_proj_adapter: ExpertAdapter | None = None
        self.ranks: ExpertRanks | None = None
        """Set by the engine, together with parameters that are this rank's part; None: all experts."""
        self.queue: WeightGradientQueue | None = None
        """Where the backward queues weight gradients; None: it computes them."""
        self.casts: ExpertCasts | None = None
        """Set by the engine where products are in float8."""
        self.add_rows: Callable[[int, int], None] | None = None
        """Set by the engine: see `StepBalance.add_rows`."""

        columns, rows = (1, 2) if transposed else (2, 1)
        blocks = 1 if activation.interleaved else 2
        self.inner_shards: dict[str, Shard | None] = {
            "gate_up_proj": Shard(rows, blocks=blocks),
            "down_proj": Shard(columns),
            "gate_up_proj_bias": Shard(1, blocks=blocks),
            "down_proj_bias": None,
            "gate_up_proj_adapter.down": None,
            "gate_up_proj_adapter.up": Shard(1, blocks=blocks),
            "down_proj_adapter.down": Shard(2),
            "down_proj_adapter.up": None,
        }
        """By parameter, how `etp` divides its inner features; None: each rank has all of it."""
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the parameters to random values, as those of `nn.Linear`: uniform within 1 / sqrt(inputs)."""
        down, gate_up = (self.down_proj, self.down_proj_bias), (self.gate_up_proj, self.gate_up_proj_bias)
        for weight, bias in (gate_up, down):
            bound = weight.shape[1 if self.transposed else 2] ** -0.5
            nn.init.uniform_(weight, -bound, bound)
            if bias is not None:
                nn.init.uniform_(bias, -bound, bound)

    def defer_weight_gradients(self, queue: WeightGradientQueue) -> None:
        """Make the backward of later calls add its weight gradients' computation to `queue`."""
        self.queue = queue
        adapters = (one for one in (self.gate_up_proj_adapter, self.down_proj_adapter) if one is not None)
        factors = (factor for one in adapters for factor in (one.down, one.up))
        # Weights that a parametrisation computes are no parameters.
        products = (self.gate_up_proj, self.down_proj, *factors)
        queue.products |= {id(weight) for weight in products if weight.is_leaf}

    def forward(self, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Return each token's weighted sum of its experts' outputs, `[T, H]` like `hidden`.

        `hidden [T, H]`; `indices [T, k]`: the numbers of the tokens' experts, of which -1 stands for none;
        `weights [T, k]`. On meta routing is assumed to be uniform. Communication: see
        `plait.tensor.experts.token_exchange`; where several ranks give the same tokens, also an all-gather
        of the output over them, and two in the backward; in float8 that of `MatrixCasts`. Raises ModelError
        for tokens of another dtype than the matrices, and in float8 within `torch.autocast`.
        """
        return self.start(hidden, indices, weights)()

    @keeps_positions_later("hidden")
    def start(
        self, hidden: Tensor, indices: Tensor, weights: Tensor, *, of_router: bool = False
    ) -> Callable[[], Tensor]:
        """Start sending tokens to the ranks of their experts; return a function that returns the output.

        `of_router`: whether `indices` are a `Router`'s, of which only those of padding are -1. Where there is
        none, and each rank has all experts, the host does not wait for the number of pairs.
        """
        dtype, ranks, trace = _autocast_dtype(hidden), self.ranks, TRACE.get()
        if dtype is not None and self.casts is not None:
            raise ModelError(
                f"{self.num_experts} experts multiply in float8, by plan.linears, and are called within "
                "torch.autocast, which would give their output another dtype: take torch.autocast out of the "
                "layer (plan.precision sets the dtype), or set plan.linears to None."
            )
        hidden = hidden.to(dtype or hidden.dtype)
        if dtype is None:
            self._require_dtype(hidden)
        if trace is not None:
            form = TensorForm.contiguous(hidden.shape, hidden.dtype)
            given, parameters = [hidden, indices, weights], list(self.parameters())
            compute = partial(_output, dtype, of_router)
            (output,) = trace.call(compute, self, given, [form], parameters=parameters)
            return lambda: output
        if not of_router:
            self._require_numbers(indices)
        if ranks is None:
            return partial(self._computed, hidden, indices, weights, of_router)
        size = hidden.shape[0]
        hidden, weights = (split(one, ranks.tokens, 0) for one in (hidden, weights))
        indices = own_range(indices, ranks.tokens, 0)
        finish: Callable[[], Tensor] = partial(self._computed, hidden, indices, weights, of_router)
        if ranks.group.size > 1:
            finish = self._start_exchange(ranks, hidden, indices, weights)
        return lambda: gather(finish(), ranks.tokens, 0, size)

    def _require_dtype(self, hidden: Tensor) -> None:
        """Raise ModelError for tokens in another dtype than the matrices, as a linear refuses them."""
        if hidden.dtype != self.gate_up_proj.dtype:
            given, own = (str(one).removeprefix("torch.") for one in (hidden.dtype, self.gate_up_proj.dtype))
            raise ModelError(
                f"{self.num_experts} experts with matrices in {own} are given tokens in {given}: cast them "
                f"to {own}."
            )

    def _require_numbers(self, indices: Tensor) -> None:
        """Raise DataError (CPU only) where `indices` name experts that do not exist; -1 stands for none."""
        if indices.device.type != "cpu" or not indices.numel():
            return
        least, most = (int(one) for one in indices.aminmax())
        if least < -1 or most >= self.num_experts:
            raise DataError(
                f"tokens were sent to the experts {least} to {most} of {self.num_experts}: give numbers from "
                f"0 to {self.num_experts - 1}, or -1 for none."
            )

    def _computed(self, hidden: Tensor, indices: Tensor, weights: Tensor, of_router: bool) -> Tensor:
        """Return the output for tokens of this rank, which holds all experts."""
        all_chosen = of_router and not has_padding()
        assignments = computed_once(lambda: assign(indices, range(self.num_experts), all_chosen=all_chosen))
        return compute_experts(hidden, weights, None, self._call(hidden, assignments))

    def _start_exchange(
        self, ranks: ExpertRanks, hidden: Tensor, indices: Tensor, weights: Tensor
    ) -> Callable[[], Tensor]:
        """Start sending tokens with their experts' numbers and weights; return a function for the output."""
        group, etp = ranks.group, ranks.etp
        exchange = computed_once(lambda: self._exchange(indices, ranks))
        weights = weights.to(torch.promote_types(weights.dtype, hidden.dtype))
        numbers = indices.to(torch.int64 if hidden.itemsize == 8 else torch.int32)
        sent, run = (hidden.detach(), weights.detach(), numbers), RECOMPUTED_RUN.get()
        # A second run may find them among the results of the first.
        pending = exchange.start(pack(*sent)) if run is None or not run.is_second else None

        def finish() -> Tensor:
            rows = kept(lambda: ((pending or exchange.start(pack(*sent)))(),))[0]
            assert rows is not None
            tokens, token_weights, theirs = unpack(rows, sent)
            own = divide(self.num_experts, group.size // etp)[group.index // etp]
            assignments = computed_once(lambda: assign(theirs, own, exchange.counts.of_experts))
            call = self._call(hidden, assignments, exchange, adds_bias=group.index % etp == 0)
            return compute_experts(hidden, weights, (tokens, token_weights), call)

        return finish

    def _exchange(self, indices: Tensor, ranks: ExpertRanks) -> TokenExchange:
        """Return how tokens travel to the ranks of their experts, and count their rows."""
        found = exchange_of(indices, self.num_experts, ranks.group, ranks.etp, ranks.takes_all)
        if self.add_rows is not None and not indices.is_meta:
            self.add_rows(*found.counts.with_others(ranks.group.index))
        return found

    def _call(
        self,
        hidden: Tensor,
        assignments: Assignments,
        exchange: TokenExchange | None = None,
        *,
        adds_bias: bool = True,
    ) -> ExpertCall:
        parameters = ExpertParameters(
            *(self.gate_up_proj, self.down_proj, self.gate_up_proj_bias, self.down_proj_bias),
            transposed=self.transposed,
            gate_up_adapter=_low_rank(self.gate_up_proj_adapter),
            down_adapter=_low_rank(self.down_proj_adapter),
        )
        queue = self.queue if defers(hidden) else None
        dtype = _autocast_dtype(hidden)
        return ExpertCall(
            assignments,
            parameters if dtype is None else parameters.to(dtype),
            self.activation,
            self.weights_first,
            adds_bias,
            queue,
            exchange,
            self.casts,
        )


def _output(
    dtype: torch.dtype | None,
    of_router: bool,
    experts: Experts,
    hidden: Tensor,
    indices: Tensor,
    weights: Tensor,
) -> tuple[Tensor]:
    """Return the output of experts that a compiled layer has recorded, under `torch.autocast` to `dtype`."""
    with nullcontext() if dtype is None else torch.autocast(hidden.device.type, dtype):
        return (experts.start(hidden, indices, weights, of_router=of_router)(),)


def _low_rank(adapter: ExpertAdapter | None) -> LowRank | None:
    return None if adapter is None else LowRank(adapter.down, adapter.up, adapter.scale)


def start_experts(
    experts: Experts, router: nn.Module, hidden: Tensor, indices: Tensor, weights: Tensor
) -> Callable[[], Tensor]:
    """Start sending tokens to their experts; return a function that waits, and returns the output.

    `indices` and `weights` are the choice of `router`. Experts with hooks, or of a class
    with a `forward` of its own, are called at once, as a module.
    """
    kind = type(experts)
    has_own_call = kind.forward is not Experts.forward and kind.start is Experts.start
    if has_own_call or is_altered(experts):
        return partial(experts, hidden, indices, weights)
    of_router = type(router) is Router and not is_altered(router)
    return experts.start(hidden, indices, weights, of_router=of_router)


def _autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """Return the dtype to which `torch.autocast` casts the operands of linears, or None where it is off."""
    device = tensor.device.type
    is_on = not tensor.is_meta and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_on else None
