"""`Decoder`: the sizes of a decoder-only transformer, their checks, and figures such as parameter counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from plait.errors import ModelError
from plait.plan.argument_checks import require_flag, require_number, require_whole

LayerKind: TypeAlias = str
"""What the layers that do the same work have in common. Of plait's own models "embedding", "attention", "mlp"
and "head", where a transformer block is two layers."""
Family = Literal["gpt2", "llama"]
FAMILIES: Mapping[Family, Mapping[str, bool]] = {
    "gpt2": {"biases": True, "positions": True, "tied": True},
    "llama": {"gated": True, "rotary": True, "tied": False},
}
"""Plait's own models, and what they are besides their sizes; others may tie the head, or not."""
ROPE_BASE = 10000.0
INNER_MULTIPLE = 256
"""Llama's inner width is a multiple of it, as in the published code."""
TOP_K = 2
"""Experts of a token, if not given, as in Mixtral."""
LOSS_CHUNK_BYTES = 1 << 26
"""Of 16-bit logits that the loss converts to float32 at once; more hide the time of the host on a GPU."""
OPTIONAL = ("kv_heads", "inner", "experts")
"""Sizes that may be None."""
MOST_BLOCKS, MOST_SIZE = 10_000, 2**31 - 1
"""The largest number of transformer blocks, and of any other size, that files may give."""
FLOPS = 6.0
"""Floating-point operations of a multiplication in forward and backward: two and four."""


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Sizes of a decoder-only transformer like plait's `gpt2` and `llama`: layers, width, heads, vocabulary.

    `layers` counts transformer blocks. `kv_heads`: key and value heads; None: as many as heads. `inner`: the
    width inside the MLP; None: 4 · hidden, or Llama's rule where the MLP is `gated`. `experts`: how many such
    MLPs each block has, of which a token passes through `top_k`, and through one of width `shared`; None: one
    MLP. `biases`: linears and norms have them, as GPT-2's norms do. `positions`: the embedding has a table of
    positions. `rotary`: attention turns pairs of features of queries and keys, by frequencies of base
    `rope_base`. `tied`: the head uses the token embedding. Raises ModelError for sizes that do not fit each
    other.
    """

    layers: int
    hidden: int
    heads: int
    vocab: int
    context: int
    kv_heads: int | None = None
    inner: int | None = None
    experts: int | None = None
    top_k: int = TOP_K
    shared: int = 0
    gated: bool = False
    biases: bool = False
    positions: bool = False
    rotary: bool = False
    tied: bool = False
    rope_base: float = ROPE_BASE

    @classmethod
    def of_family(cls, family: Family, **sizes: Any) -> Decoder:
        """Return the sizes of a `gpt2` or `llama`; sizes that are not given are the family's defaults."""
        return cls(**{**FAMILIES[family], **sizes})

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocab", "context", "top_k", *OPTIONAL):
            value = getattr(self, name)
            if value is not None or name not in OPTIONAL:
                require_whole(f"model.{name}", value, ModelError)
        require_whole("model.shared", self.shared, ModelError, least=0)
        require_flag("model.tied", self.tied, ModelError)
        require_number("model.rope_base", self.rope_base, ModelError, positive=True)
        hidden, heads = self.hidden, self.heads
        if hidden % heads:
            raise ModelError(
                f"model.hidden = {hidden} is not divisible by model.heads = {heads}: "
                f"set model.hidden to {multiples(hidden, heads)}, or change model.heads."
            )
        if heads % self.key_heads:
            raise ModelError(
                f"model.kv_heads = {self.kv_heads} does not divide model.heads = {heads}: "
                f"set model.kv_heads to {divisors(heads)}."
            )
        if self.rotary and self.head_size % 2:
            raise ModelError(
                f"model.hidden = {hidden} over model.heads = {heads} makes heads of {self.head_size} "
                "features, and llama turns pairs of them: set model.hidden to "
                f"{multiples(hidden, 2 * heads)}, or change model.heads."
            )
        self._require_experts()

    def _require_experts(self) -> None:
        """Raise ModelError for numbers of experts that do not fit each other, or the family."""
        if self.experts is None and self.shared:
            raise ModelError(
                f"model.shared = {self.shared} is the width of shared experts, but model.experts is none: "
                "give the number of the others, or leave model.shared out."
            )
        if self.experts is not None and not self.gated:
            raise ModelError(
                f"model.experts = {self.experts} is a number of gated MLPs, which only llama has: leave it "
                "out, or build a llama."
            )
        if self.experts is not None and self.top_k > self.experts:
            raise ModelError(
                f"model.top_k = {self.top_k} is more than model.experts = {self.experts}: set model.top_k to "
                f"at most {self.experts}, the experts that a token passes through."
            )

    @property
    def family(self) -> Family:
        """The name of plait's own model of this kind: `gpt2` with a table of positions, else `llama`."""
        return "gpt2" if self.positions else "llama"

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
        """The number of features inside the MLP, or inside each expert."""
        if self.inner is not None:
            return self.inner
        return default_inner(self.hidden) if self.gated else 4 * self.hidden

    def undivided_by(self, tp: int) -> Literal["heads", "kv_heads", "inner", "shared"] | None:
        """Return the name of the first size that `tp` ranks cannot share equally, or None.

        Several ranks may share a head of keys; a vocabulary may be cut unevenly; experts are not cut.
        """
        if self.heads % tp:
            return "heads"
        if self.key_heads % tp and tp % self.key_heads:
            return "kv_heads"
        if self.experts is not None:
            return "shared" if self.shared % tp else None
        return "inner" if self.inside % tp else None

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer of the sequence, such as "attention" or "mlp", first layer first."""
        return ("embedding", *(("attention", "mlp") * self.layers), "head")

    @property
    def layer_costs(self) -> tuple[float, ...]:
        """Multiplications per token of each layer, by which plait divides layers into stages.

        One more of layers without attention, so that an embedding has a cost, as in `layer_costs` of modules.
        """
        one_more = {kind: self._multiplications(kind) + (kind != "attention") for kind in {*self.kinds}}
        return tuple(one_more[kind] for kind in self.kinds)

    @property
    def operations_per_token(self) -> float:
        """Floating-point operations per token, forward and backward, without recomputation.

        As `plait train` counts them (Chowdhery et al. 2022, arXiv:2204.02311, appendix B): six for each
        element of a matrix that the token meets, of experts `top_k` for each block, and twelve for each
        feature and position of attention, masked or not.
        """
        return FLOPS * sum(map(self._multiplications, self.kinds))

    def _multiplications(self, kind: LayerKind) -> float:
        if kind == "embedding":  # looked up
            return 0.0
        width = self.hidden if kind == "attention" else 0
        active = None if self.experts is None else self.top_k
        return multiplications(self._matrices(kind, experts=active), context=self.context, width=width)

    def _matrices(self, kind: LayerKind, tp: int = 1, experts: int | None = None) -> int:
        """Return the elements of a layer's matrices on all ranks of `tp`; each has a head of keys.

        `experts`: how many of them count; None: all.
        """
        if kind == "attention":
            keys = self.head_size * max(self.key_heads, min(tp, self.heads))
            return 2 * self.hidden * (self.hidden + keys)
        if kind == "mlp" and self.experts is not None:
            counted = self.experts if experts is None else experts
            return self.hidden * (self.experts + 3 * (counted * self.inside + self.shared))
        if kind == "mlp":
            return (3 if self.gated else 2) * self.hidden * self.inside
        return self.hidden * self.vocab

    def parameters(self, kind: LayerKind, tp: int = 1) -> float:
        """Return the number of parameters of a layer on a `tp` rank; a tied head counts its own copy."""
        matrices, norm = self._matrices(kind, tp) / tp, (2 if self.biases else 1) * self.hidden
        if kind == "embedding":
            return matrices + (self.context * self.hidden if self.positions else 0)
        biases = 0.0
        if self.biases and kind == "attention":
            biases = (self.hidden + 2 * self.key_heads * self.head_size) / tp + self.hidden
        elif self.biases and kind == "mlp":
            biases = self.inside / tp + self.hidden
        return matrices + biases + norm

    def parameters_of(self, kinds: Sequence[LayerKind], tp: int = 1) -> float:
        """Return the number of parameters of several layers on a `tp` rank; a tied table counts once."""
        shared = self.hidden * self.vocab / tp if self.tied and {"embedding", "head"} <= {*kinds} else 0
        counts = Counter(kinds)
        return sum(count * self.parameters(kind, tp) for kind, count in counts.items()) - shared

    @property
    def total_parameters(self) -> float:
        """The number of parameters of the whole model."""
        return self.parameters_of(self.kinds)


def decoder_of(model: object) -> Decoder | None:
    """Return a `Decoder` with the sizes of `model`, which `plait.models.gpt2` or `llama` has made.

    None for another model, for one whose blocks differ or have experts, and for one with adapters or frozen
    parameters. Only shapes are read: the model may be on the meta device.
    """
    if isinstance(model, Decoder):
        return model
    found: Any = model
    try:
        token, blocks, head = found.embedding.token, list(found.blocks), found.head.output
        sizes = {_block_sizes(block) for block in blocks}
        context = int(found.context)
    except (AttributeError, TypeError):
        return None
    if len(sizes) != 1 or not all(one.requires_grad for one in found.parameters()):
        return None
    heads, kv_heads, inner, rope_base = sizes.pop()
    return Decoder.of_family(
        "gpt2" if rope_base is None else "llama",
        layers=len(blocks),
        hidden=token.embedding_dim,
        heads=heads,
        kv_heads=kv_heads,
        inner=inner,
        vocab=token.num_embeddings,
        context=context,
        tied=head.weight is token.weight,
        rope_base=rope_base or ROPE_BASE,
    )


def _block_sizes(block: Any) -> tuple[int, int, int, float | None]:
    """Return heads, key heads, inner width, and the base of rotary frequencies, which only Llama has."""
    attention = block.attention
    heads = int(attention.heads)
    base = getattr(attention, "rope_base", None)
    return heads, int(getattr(attention, "kv_heads", heads)), int(block.mlp.up.out_features), base


def multiplications(matrices: float, *, context: float, width: float) -> float:
    """Return the multiplications per token of a layer: one per matrix element, and attention's.

    And of attention two for each of its `width` features and each position of `context`: of the scores, and
    of the weighted values.
    """
    return matrices + 2.0 * context * width


def default_inner(hidden: int) -> int:
    """Return the default inner width of Llama's MLP: 2/3 · 4 · hidden, rounded up to a multiple of 256.

    The three matrices then have about as many weights as the two of a GPT (Shazeer 2020, section 2).
    """
    return -(-8 * hidden // (3 * INNER_MULTIPLE)) * INNER_MULTIPLE


def multiples(value: int, step: int) -> str:
    """Return the positive multiples of `step` next to `value`, such as "8 or 12"."""
    below = value // step * step
    return f"{below} or {below + step}" if below else str(step)


def divisors(value: int) -> str:
    """Return the divisors of `value`, such as "1 or 2 or 4"."""
    return " or ".join(str(n) for n in range(1, value + 1) if value % n == 0)
