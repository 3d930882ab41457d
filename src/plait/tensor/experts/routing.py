"""`Routing`: how the logits of a token become the experts that it is sent to, and their weights.

    logits [T, E] ─ scores ─→ scores [T, E] ─ choose ─→ indices [T, k] ─ weights ─→ weights [T, k]

Letters: T tokens, E experts, k experts of a token.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from plait.errors import ModelError
from plait.plan.argument_checks import require_choice, require_flag, require_number, require_whole

Scores: TypeAlias = Literal["softmax", "softmax_of_chosen", "sigmoid"]
SCORES: tuple[Scores, ...] = ("softmax", "softmax_of_chosen", "sigmoid")
_TINY = 1e-20
"""Added to the sum of a token's weights, which is 0 where all its sigmoids are; others do not change."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How the logits of a token become its experts and their weights, in float32 at least.

    | model | description |
    |---|---|
    | Mixtral | `Routing()` |
    | Qwen2-MoE, Qwen3-MoE, OLMoE | `Routing(normalized=norm_topk_prob)` |
    | GPT-OSS | `Routing(scores="softmax_of_chosen")`, with `Router(bias=True)` |
    | DeepSeek-V3 | `Routing(scores="sigmoid", corrected=True, groups=8, chosen_groups=4, scale=2.5)` |

    The k experts of the largest scores are chosen, in the order of their scores; of equal ones the first.
    Raises ModelError for values that do not fit each other.
    """

    scores: Scores = "softmax"
    """`softmax` of all logits, or the `sigmoid` of each, before the choice; `softmax_of_chosen`: experts are
    chosen by their logits, and the softmax is that of the k chosen."""
    normalized: bool = True
    """Whether the weights of a token add up to `scale`; else they are its scores, times `scale`."""
    scale: float = 1.0
    """A factor of all weights."""
    corrected: bool = False
    """Whether experts are chosen by score plus correction, a number of each expert (Wang et al. 2024,
    arXiv:2408.15664); weights come from the scores alone."""
    groups: int = 1
    """The number of groups of neighbouring experts. A group's score is the sum of its two largest ones."""
    chosen_groups: int = 1
    """The number of groups with the largest scores, in which a token's experts are chosen (DeepSeek-AI 2024,
    arXiv:2412.19437, section 2.1.2)."""
    capacity_factor: InitVar[float | None] = None
    """Refused: an expert computes all tokens that are sent to it."""
    jitter: InitVar[float] = 0.0
    """Refused unless 0."""

    def __post_init__(self, capacity_factor: float | None, jitter: float) -> None:
        require_choice("scores of a routing", self.scores, SCORES, ModelError)
        require_flag("normalized of a routing", self.normalized, ModelError)
        require_number("scale of a routing", self.scale, ModelError, positive=True)
        require_flag("corrected of a routing", self.corrected, ModelError)
        require_whole("groups of a routing", self.groups, ModelError)
        require_whole("chosen_groups of a routing", self.chosen_groups, ModelError)
        if self.scores == "softmax_of_chosen" and not self.normalized:
            raise ModelError(
                "a routing has scores = 'softmax_of_chosen', whose weights always add up to 1, and "
                "normalized = False: set scores to 'softmax'."
            )
        if self.chosen_groups > self.groups:
            raise ModelError(
                f"a routing has chosen_groups = {self.chosen_groups} of groups = {self.groups}: choose at "
                "most as many groups as there are."
            )
        if capacity_factor is not None:
            raise ModelError(
                f"a routing has capacity_factor = {capacity_factor!r}, with which experts would leave out "
                "tokens, others in each layout; experts of plait compute every token: leave it out."
            )
        if jitter != 0.0:
            raise ModelError(
                f"a routing has jitter = {jitter!r}, with random factors that would differ between layouts: "
                "set it to 0."
            )

    def require_sizes(self, experts: int, top_k: int) -> None:
        """Raise ModelError unless `top_k` of `experts` can be chosen, in groups of equal size."""
        require_whole("experts", experts, ModelError)
        require_whole("top_k", top_k, ModelError)
        if experts % self.groups or (self.groups > 1 and experts < 2 * self.groups):
            raise ModelError(
                f"a routing has groups = {self.groups}, but there are {experts} experts: give a multiple of "
                "the groups, at least 2 for each."
            )
        eligible = experts // self.groups * self.chosen_groups
        if top_k > eligible:
            raise ModelError(
                f"top_k = {top_k} experts of a token are to be chosen among {eligible}: set top_k to at most "
                f"{eligible}."
            )

    def scores_of(self, logits: Tensor) -> Tensor:
        """Return the scores `[T, E]`, in float32 or wider."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.scores == "softmax":
            return wide.softmax(-1)
        return wide.sigmoid() if self.scores == "sigmoid" else wide

    @torch.no_grad()
    def choose(self, scores: Tensor, correction: Tensor | None, top_k: int) -> Tensor:
        """Return the numbers of each token's experts, int64 `[T, k]`; of equal scores the lowest number.

        `correction`: `[E]`, where the routing is `corrected`.
        """
        if correction is not None:
            scores = scores + correction
        if self.chosen_groups < self.groups:
            scores = self._within_groups(scores)
        return _largest(scores, top_k)

    def _within_groups(self, scores: Tensor) -> Tensor:
        """Return the scores, with minus infinity for experts outside of the chosen groups."""
        grouped = scores.view(*scores.shape[:-1], self.groups, -1)
        of_groups = grouped.topk(2, -1).values.sum(-1)
        chosen = torch.zeros_like(of_groups, dtype=torch.bool)
        chosen.scatter_(-1, _largest(of_groups, self.chosen_groups), True)
        return grouped.masked_fill(~chosen.unsqueeze(-1), -torch.inf).view(scores.shape)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probabilities of a token's experts, for auxiliary losses, `[T, E]`; they add up to 1.

        The softmax of all logits, or sigmoids over their sum, as DeepSeek-V3 has it.
        """
        if self.scores != "sigmoid":
            return logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
        scores = self.scores_of(logits)
        return scores / (scores.sum(-1, keepdim=True) + _TINY)

    def uncorrected_choice(self, logits: Tensor, indices: Tensor) -> Tensor:
        """Return the `k` experts of the largest scores, without correction and groups, for auxiliary losses.

        `indices [T, k]`: those that were chosen, which are the same unless the routing has either.
        """
        if self.corrected or self.chosen_groups < self.groups:
            return _largest(self.scores_of(logits), indices.shape[-1])
        return indices

    def weights(self, scores: Tensor, indices: Tensor) -> Tensor:
        """Return the weights `[T, k]` of the experts `indices [T, k]`, in the dtype of `scores`."""
        weights = scores.gather(-1, indices)
        if self.scores == "softmax_of_chosen":
            weights = weights.softmax(-1)
        elif self.normalized:
            weights = normalized_weights(weights)
        return weights if self.scale == 1.0 else weights * self.scale


def normalized_weights(weights: Tensor) -> Tensor:
    """Return each token's weights, `[T, k]`, divided by their sum. A `TorchFunctionMode` can replace it."""
    if has_torch_function_variadic(weights):
        replaced: Tensor = handle_torch_function(normalized_weights, (weights,), weights)
        return replaced
    return weights / (weights.sum(-1, keepdim=True) + _TINY)


def balanced_indices(positions: Tensor, experts: int, top_k: int) -> Tensor:
    """Return experts that load all alike whatever the scores are, for timings: int64 `[T, k]`.

    The token at position t has the experts t, t + s, …, t + (k - 1) s, modulo E, where each E positions in a
    row have one stride s, from 1 to E // k in turn: so a token visits about as many ranks as under uniform
    routing, and not only that of neighbouring experts. `positions [T]`: int64.
    """
    strides = positions // experts % (experts // top_k) + 1
    steps = torch.arange(top_k, device=positions.device)
    return (positions[:, None] + strides[:, None] * steps) % experts


def _largest(scores: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` largest scores in the last dim; of equal ones the lowest.

    NaN counts as infinite.
    """
    # `torch.topk` returns any of equal numbers; the bits of float64 leave no room for an index.
    if scores.dtype == torch.float64:
        return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return _distinct_keys(scores).topk(count, -1).indices


def _distinct_keys(scores: Tensor) -> Tensor:
    """Return int64 keys in the order of float32 `scores [..., E]`, and of equal ones in that of `-index`."""
    numbers = (scores + 0.0).nan_to_num(torch.inf, torch.inf, -torch.inf)  # 0.0 in place of -0.0
    bits = numbers.view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # of negative numbers a larger magnitude is less
    experts = scores.shape[-1]
    later_last = torch.arange(experts, 0, -1, device=scores.device)
    return later_last.add(ordered, alpha=experts)
