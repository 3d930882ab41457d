"""`Family`: a short declaration of how one family of transformers' decoders differs from the others.

    layers      embed_tokens → (attention → MLP) · n → norm and lm_head
    a branch    x + dropout(after(f(before(x)))), where f is attention or the MLP

`Family()` is Llama. What the modules of a model tell (bases of rotary embeddings, layers without positions,
scaled embeddings, biases, the scale of the scores) needs no declaration. Which other values of the
configuration the model's code reads has to be declared: a configuration may hold values that it ignores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from plait.plan.rules import Rule, Rules, column, entrance, norm, piece, replicated, row, sequence, vocabulary

HEADS, KEY_HEADS = "config.num_attention_heads", "config.num_key_value_heads"
GATED: Rules = {"gate_proj": column, "up_proj": column, "down_proj": row}
"""The rules of an MLP with a gate, by the names of its linears."""
ENTRANCE = "entrance"
"""The name of the module at which a branch without a norm in front enters its region."""


@dataclass(frozen=True)
class Branch:
    """The modules around attention or MLP in a block, by their names in transformers; None: there is none."""

    before: str | None
    """The norm of its input."""
    after: str | None = None
    """The norm of its output."""
    dropout: str | None = None
    """The dropout of its output."""


@dataclass(frozen=True)
class Family:
    """A family of decoders: modules by their names in transformers, and what is special about them."""

    attention: Branch = Branch("input_layernorm")
    mlp: Branch = Branch("post_attention_layernorm")
    query_key_value: str | None = None
    """The one linear of queries, keys and values, in this order; None: `q_proj`, `k_proj` and `v_proj`."""
    head_norms: Literal["none", "each", "joint"] = "none"
    """Whether `q_norm` and `k_norm` normalize queries and keys: each head by itself, or all heads jointly."""
    windows: Literal["none", "all", "by type"] = "none"
    """Which layers attend to the last `sliding_window` positions only: "by type", those of type
    `sliding_attention` in the configuration's `layer_types`."""
    score_cap: str | None = None
    """The value of the configuration that caps the attention scores."""
    logit_cap: str | None = None
    """The value of the configuration that caps the logits."""
    bidirectional: str | None = None
    """The value of the configuration that lets positions attend to later ones, which plait refuses."""
    rotates_part: bool = False
    """Whether the model's code takes angles for the first features of a head only."""
    ignored: tuple[str, ...] = ()
    """Values of the configuration that the model's code does not read, such as "sliding_window"."""
    mlp_rules: Mapping[str, Rule] = field(default_factory=lambda: GATED)
    """The rules of the MLP's linears, by their names."""
    norm_start: float = 1.0
    """The first value of the norms' weights: 0 where a norm multiplies by 1 + weight."""

    def rules(self) -> Rules:
        """Return how the layers are partitioned over `tp`: by heads, features of the MLP and vocabulary."""
        projections = {
            "q_proj": column.by(HEADS),
            "k_proj": column.by(KEY_HEADS, repeated=True),
            "v_proj": column.by(KEY_HEADS, repeated=True),
        }
        if self.query_key_value is not None:
            projections = {self.query_key_value: column.joined(HEADS, KEY_HEADS, KEY_HEADS)}
        norms = {
            "none": {},
            "each": {"q_norm": replicated, "k_norm": replicated},
            "joint": {"q_norm": norm.by(HEADS), "k_norm": norm.by(KEY_HEADS, repeated=True)},
        }
        of_attention = {**projections, **norms[self.head_norms], "o_proj": row.by(HEADS)}
        return {
            "embedding.embed_tokens": vocabulary,
            "blocks.*.attention": sequence,
            f"blocks.*.attention.{self.attention.before or ENTRANCE}": entrance,
            **{f"blocks.*.attention.self_attn.{name}": rule for name, rule in of_attention.items()},
            "blocks.*.attention.attention_dropout": piece.along(1),
            "blocks.*.mlp": sequence,
            f"blocks.*.mlp.{self.mlp.before or ENTRANCE}": entrance,
            **{f"blocks.*.mlp.mlp.{name}": rule for name, rule in self.mlp_rules.items()},
            "head": sequence,
            "head.norm": entrance,
            "head.lm_head": vocabulary,
        }


LLAMA = Family()
MISTRAL = Family(windows="all")
QWEN2 = Family(windows="by type")
"""Qwen2, and SmolLM 3, of which some layers have no positions."""
QWEN3 = Family(head_norms="each", windows="by type")
GEMMA2 = Family(
    attention=Branch("input_layernorm", "post_attention_layernorm"),
    mlp=Branch("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    windows="by type",
    score_cap="attn_logit_softcapping",
    logit_cap="final_logit_softcapping",
    bidirectional="use_bidirectional_attention",
    norm_start=0.0,
)
GEMMA3 = Family(
    attention=Branch("input_layernorm", "post_attention_layernorm"),
    mlp=Branch("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    head_norms="each",
    windows="by type",
    logit_cap="final_logit_softcapping",
    bidirectional="use_bidirectional_attention",
    norm_start=0.0,
)
PHI3 = Family(
    attention=Branch("input_layernorm", dropout="resid_attn_dropout"),
    mlp=Branch("post_attention_layernorm", dropout="resid_mlp_dropout"),
    query_key_value="qkv_proj",
    windows="all",
    rotates_part=True,
    mlp_rules={"gate_up_proj": column.joined(2), "down_proj": row},
)
OLMO2 = Family(
    attention=Branch(None, "post_attention_layernorm"),
    mlp=Branch(None, "post_feedforward_layernorm"),
    head_norms="joint",
)
