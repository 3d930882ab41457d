"""`Decoder`: the sizes of a decoder-only transformer, and the parameters that follow from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from plait.errors import ModelError
from plait.model_size_rules import default_inner

LayerKind = Literal["embedding", "attention", "mlp", "head"]
"""The layers of plait's own models: a transformer block is two layers."""


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Sizes of a decoder-only transformer, as plait's `gpt2` and `llama` are.

    `layers` counts transformer blocks. `kv_heads`: key and value heads; None: as many as heads. `inner`: the
    width inside the MLP; None: 4 · hidden, or Llama's rule where the MLP is `gated`. `biases`: linears and
    norms have them, as GPT-2's norms do. `positions`: the embedding has a table of positions. `rotary`:
    attention turns queries and keys. `tied`: the head uses the token embedding. Raises ModelError for sizes
    that do not fit each other.
    """

    layers: int
    hidden: int
    heads: int
    vocab: int
    context: int
    kv_heads: int | None = None
    inner: int | None = None
    gated: bool = False
    biases: bool = False
    positions: bool = False
    rotary: bool = False
    tied: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocab", "context", "kv_heads", "inner"):
            value = getattr(self, name)
            if value is None and name in ("kv_heads", "inner"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ModelError(f"model.{name} is {value!r}: give a whole number of at least 1.")
        if self.hidden % self.heads:
            raise ModelError(
                f"model.hidden = {self.hidden} is not divisible by model.heads = {self.heads}: change one."
            )
        if self.heads % self.key_heads:
            raise ModelError(
                f"model.kv_heads = {self.kv_heads} does not divide model.heads = {self.heads}: change one."
            )

    @property
    def key_heads(self) -> int:
        """The number of key and value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_size(self) -> int:
        """The features of a head."""
        return self.hidden // self.heads

    @property
    def inside(self) -> int:
        """The width inside the MLP."""
        if self.inner is not None:
            return self.inner
        return default_inner(self.hidden) if self.gated else 4 * self.hidden

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer of the sequence, first layer first."""
        return ("embedding", *(("attention", "mlp") * self.layers), "head")

    @property
    def layer_costs(self) -> tuple[float, ...]:
        """The multiplications a token of each layer, by which plait cuts a model into stages."""
        keys = self.key_heads * self.head_size
        costs: dict[LayerKind, float] = {
            "embedding": 1.0,
            "attention": 2.0 * self.hidden * (self.hidden + keys) + 2.0 * self.context * self.hidden,
            "mlp": 1.0 + self._mlp_matrices,
            "head": 1.0 + self.hidden * self.vocab,
        }
        return tuple(costs[kind] for kind in self.kinds)

    def parameters(self, kind: LayerKind, tp: int = 1) -> float:
        """Return the parameters of a layer on a rank of `tp`; a tied head counts as if it had its own."""
        norm = (2 if self.biases else 1) * self.hidden
        keys = self.key_heads * self.head_size
        if kind == "attention":
            matrices = 2 * self.hidden * (self.hidden + max(keys, self.head_size * min(tp, self.heads)))
            biases = (self.hidden + 2 * keys) / tp + self.hidden if self.biases else 0
            return matrices / tp + biases + norm
        if kind == "mlp":
            biases = self.inside / tp + self.hidden if self.biases else 0
            return self._mlp_matrices / tp + biases + norm
        table = self.hidden * self.vocab / tp
        if kind == "head":
            return table + norm
        return table + (self.context * self.hidden if self.positions else 0)

    def parameters_of(self, kinds: Sequence[LayerKind], tp: int = 1) -> float:
        """Return the parameters of several layers on a rank of `tp`; a tied table counts once."""
        shared = self.hidden * self.vocab / tp if self.tied and {"embedding", "head"} <= {*kinds} else 0
        counts = Counter(kinds)
        return sum(count * self.parameters(kind, tp) for kind, count in counts.items()) - shared

    @property
    def total_parameters(self) -> float:
        """The parameters of the whole model."""
        return self.parameters_of(self.kinds)

    @property
    def operations_per_token(self) -> float:
        """Floating-point operations of forward and backward a token, without recomputation.

        As `plait train` counts them (Chowdhery et al. 2022, arXiv:2204.02311, appendix B): six for each
        element of a matrix, and twelve for each feature and position of attention, masked or not.
        """
        keys = self.key_heads * self.head_size
        matrices = 2 * self.hidden * (self.hidden + keys) + self._mlp_matrices
        attention = 2 * self.context * self.hidden
        return 6.0 * (self.layers * (matrices + attention) + self.hidden * self.vocab)

    @property
    def _mlp_matrices(self) -> int:
        return (3 if self.gated else 2) * self.hidden * self.inside


def stage_kinds(kinds: Sequence[LayerKind], cut: Sequence[int]) -> tuple[tuple[LayerKind, ...], ...]:
    """Return the kinds of each stage's layers; `cut` has the number of layers of each stage."""
    first, stages = 0, []
    for count in cut:
        stages.append(tuple(kinds[first : first + count]))
        first += count
    return tuple(stages)
