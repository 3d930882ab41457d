"""Conversion of transformers' decoders that are Llama or its relatives, by a short declaration: a `Family`.

    layers      embed_tokens → (attention → MLP) · n → norm and lm_head
    a branch    x + dropout(after(f(before(x)))), where f is attention or the MLP

`Family()` is Llama. What the modules of a model tell (bases of rotary embeddings, layers without positions,
scaled embeddings, biases, the scale of the scores) needs no declaration. Which other values of the
configuration the model's code reads has to be declared: a configuration may hold values that it ignores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from plait.errors import ModelError, listed
from plait.models.huggingface.common import (
    ENTRANCE,
    MLP,
    Branch,
    Embedding,
    Head,
    Rotary,
    add_branch,
    attention_parts,
    is_scaled,
    require_causal,
    require_unmodified,
    residual,
    rotate_first,
)
from plait.models.huggingface.latent_attention import LatentAttention, is_latent, latent_rules
from plait.models.huggingface.mixture import (
    SparseMLP,
    balance_weight,
    is_mixture,
    replaced_modules,
    require_known_mixtures,
    shared_name,
)
from plait.models.model_helpers import InitializedLayer, assemble, attention_cost, block
from plait.plan.rules import (
    Rule,
    Rules,
    column,
    entrance,
    norm,
    partitioned,
    piece,
    replicated,
    row,
    sequence,
    vocabulary,
)
from plait.tensor.attention.attention import attend, heads_of, share_keys
from plait.tensor.experts.balance_experts import balance_experts
from plait.tensor.experts.routing import Scores

LAYER_TYPES = ("full_attention", "sliding_attention")
"""Types of layers in a configuration that plait computes."""
_DROPOUTS = ("residual_dropout", "resid_pdrop", "hidden_dropout")
"""Names in configurations of the dropout of a branch's output."""
_UNDECLARED: Mapping[str, tuple[Any, ...]] = {
    "sliding_window": (None,),
    "attention_chunk_size": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "clip_qkv": (None,),
    "use_bidirectional_attention": (None, False),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "logits_scaling": (None, 1),
    "logit_scale": (None, 1),
    "embedding_dropout": (None, 0),
    "embd_pdrop": (None, 0),
    **dict.fromkeys(_DROPOUTS, (None, 0)),
}
"""Values of a configuration that some decoders read and others do not, with those that change nothing."""
HEADS, KEY_HEADS = "config.num_attention_heads", "config.num_key_value_heads"
GATED: Rules = {"gate_proj": column, "up_proj": column, "down_proj": row}
"""The rules of an MLP with a gate, by the names of its linears."""


@dataclass(frozen=True)
class Family:
    """A family of decoders in transformers: the names of its modules, and its peculiarities."""

    attention: Branch = Branch("input_layernorm")  # noqa: RUF009  # a Branch is frozen
    mlp: Branch = Branch("post_attention_layernorm")  # noqa: RUF009
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
    refused: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values of the configuration that the model's code computes with and plait does not, with those that
    change nothing."""
    router: Literal["none"] | Scores = "none"
    """By which scores the router of an MLP with several `experts` (`gate` or `router`) chooses among them,
    see `Routing`: `norm_topk_prob` of it normalizes weights, as they are where it has no such attribute."""
    mlp_rules: Mapping[str, Rule] = field(default_factory=lambda: GATED)
    """The rules of the linears of an MLP without a gate, by their names."""
    norm_start: float = 1.0
    """The first value of the norms' weights: 0 where a norm multiplies by 1 + weight."""

    def rules(self, attention: nn.Module, mlps: Sequence[nn.Module]) -> Rules:
        """Return how the layers are partitioned over `tp`: by heads, features of the MLP and vocabulary.

        `attention`, `mlps`: of transformers, that of any block, and one a block.
        """
        of_attention = latent_rules(attention) if is_latent(attention) else self._rules_of_heads(attention)
        return {
            "embedding.embed_tokens": vocabulary,
            "blocks.*.attention": sequence,
            **{f"blocks.*.attention.{name}": rule for name, rule in of_attention.items()},
            "blocks.*.attention.attention_dropout": piece.along(1),
            "blocks.*.mlp": sequence,
            **self._rules_of_mlps(mlps),
            "head": sequence,
            "head.norm": entrance,
            "head.lm_head": vocabulary,
        }

    def _rules_of_heads(self, attention: nn.Module) -> Rules:
        """Return the rules within an `Attention`, by names in it."""
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
        within = {**projections, **norms[self.head_norms], "o_proj": row.by(HEADS)}
        sinks = {"self_attn": partitioned.by(f"self_attn.{HEADS}")} if hasattr(attention, "sinks") else {}
        return {
            self.attention.before or ENTRANCE: entrance,
            **sinks,
            **{f"self_attn.{name}": rule for name, rule in within.items()},
        }

    def _rules_of_mlps(self, mlps: Sequence[nn.Module]) -> Rules:
        """Return the rules within MLPs. In those with experts only the shared one is a region of `tp`."""
        dense = [number for number, mlp in enumerate(mlps) if not self.is_sparse(mlp)]
        blocks = ["*"] if len(dense) == len(mlps) else dense
        rules = {f"blocks.{one}.mlp.{self.mlp.before or ENTRANCE}": entrance for one in blocks}
        if dense:
            rules |= {f"blocks.*.mlp.mlp.{name}": rule for name, rule in self.mlp_rules.items()}
        shared = next(filter(None, (shared_name(mlp) for mlp in mlps if self.is_sparse(mlp))), None)
        if shared is not None:
            rules |= {f"blocks.*.mlp.mlp.{ENTRANCE}": entrance}
            rules |= {f"blocks.*.mlp.mlp.{shared}.{name}": rule for name, rule in self.mlp_rules.items()}
        return rules

    def is_sparse(self, mlp: nn.Module) -> bool:
        """Return whether plait computes this MLP of transformers with its own experts."""
        return self.router != "none" and is_mixture(mlp)


_GEMMA2 = Family(
    attention=Branch("input_layernorm", "post_attention_layernorm"),
    mlp=Branch("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    windows="by type",
    score_cap="attn_logit_softcapping",
    logit_cap="final_logit_softcapping",
    bidirectional="use_bidirectional_attention",
    norm_start=0.0,
)
DECODERS: Mapping[str, Family] = {
    "DeepseekV3ForCausalLM": Family(router="sigmoid"),
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": replace(_GEMMA2, head_norms="each", score_cap=None),
    "GptOssForCausalLM": Family(windows="by type", router="softmax_of_chosen"),
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(windows="all"),
    "MixtralForCausalLM": Family(windows="all", router="softmax", refused={"router_jitter_noise": (None, 0)}),
    "Olmo2ForCausalLM": Family(
        attention=Branch(None, "post_attention_layernorm"),
        mlp=Branch(None, "post_feedforward_layernorm"),
        head_norms="joint",
    ),
    "OlmoeForCausalLM": Family(head_norms="joint", router="softmax", refused={"clip_qkv": (None,)}),
    "Phi3ForCausalLM": Family(
        attention=Branch("input_layernorm", dropout="resid_attn_dropout"),
        mlp=Branch("post_attention_layernorm", dropout="resid_mlp_dropout"),
        query_key_value="qkv_proj",
        windows="all",
        rotates_part=True,
        mlp_rules={"gate_up_proj": column.joined(2), "down_proj": row},
    ),
    "Qwen2ForCausalLM": Family(windows="by type"),
    "Qwen2MoeForCausalLM": Family(windows="by type", router="softmax"),
    "Qwen3ForCausalLM": Family(head_norms="each", windows="by type"),
    "Qwen3MoeForCausalLM": Family(head_norms="each", windows="all", router="softmax"),
    "SmolLM3ForCausalLM": Family(windows="by type"),  # some layers have no positions
}
"""Families by class name of transformers."""


def adapt(model: Any, family: Family) -> nn.Sequential:
    """Return `model`, a decoder of transformers of this family, as a sequence of layers.

    Raises ModelError for a model with altered code, for attention to later positions, and for values of the
    configuration that transformers does not compute either.
    """
    config, body = model.config, model.model
    layers = body.layers[: config.num_hidden_layers]  # as transformers runs them
    attentions, mlps = [one.self_attn for one in layers], [one.mlp for one in layers]
    sparse = [mlp for mlp in mlps if family.is_sparse(mlp)]
    require_unmodified(
        model,
        [
            *(body, body.rotary_emb, *layers, *attentions, *_rebuilt(body, attentions, family)),
            *(module for mlp in sparse for module in replaced_modules(mlp)),
        ],
    )
    require_causal(config, attentions, family.bidirectional)
    _require_computed(config, family)
    require_known_mixtures(model, sparse)
    std, context = config.initializer_range, config.max_position_embeddings
    rotaries = Rotary.by_layer_type(body.rotary_emb)
    windows = _windows(config, family, len(layers))
    blocks = []
    for index, one in enumerate(layers):
        rotary = rotaries[None if None in rotaries else config.layer_types[index]]
        if is_latent(one.self_attn):
            attention: nn.Module = LatentAttention(one, family.attention, rotary, std)
        else:
            attention = Attention(one, family, rotary, windows[index], std)
        start = family.norm_start
        if family.router != "none" and is_mixture(one.mlp):
            mlp: nn.Module = SparseMLP(one, family.mlp, family.router, std, norm_start=start)
        else:
            mlp = MLP(one, family.mlp, std, norm_start=start)
        blocks.append(block(attention, mlp))
    embedding = Embedding("embed_tokens", body.embed_tokens, context, std)
    cap = None if family.logit_cap is None else getattr(config, family.logit_cap)
    head = Head("norm", body.norm, model.lm_head, std, cap=cap, norm_start=family.norm_start)
    adapted = assemble(embedding, blocks, head, context=context, rules=family.rules(attentions[0], mlps))
    if sparse and (weight := balance_weight(model)):
        balance_experts(adapted, weight=weight, counts="step", coupled=True)
    return adapted


def _require_computed(config: Any, family: Family) -> None:
    """Raise ModelError where the configuration sets a value that `family` says plait does not compute."""
    for key, neutral in family.refused.items():
        value = getattr(config, key, None)
        if value not in neutral:
            raise ModelError(
                f"the configuration has {key} = {value!r}, by which transformers changes what the model "
                f"computes and plait does not: give a model without it, with {neutral[-1]!r}."
            )


def _rebuilt(body: Any, attentions: list[Any], family: Family) -> Iterator[nn.Module]:
    """Yield the modules of which the layers hold others with the same weights."""
    if is_scaled(body.embed_tokens):
        yield body.embed_tokens
    if family.head_norms == "joint":
        yield from (norm for attn in attentions for norm in (attn.q_norm, attn.k_norm))


def _windows(config: Any, family: Family, count: int) -> list[int | None]:
    """Return the attention window of each of `count` layers, as the masks of transformers have them."""
    if family.windows == "none":
        return [None] * count
    window = config.sliding_window
    if family.windows == "all":
        return [window] * count
    types = config.layer_types[:count]
    for index, one in enumerate(types):
        if one not in LAYER_TYPES or (one == LAYER_TYPES[1] and not window):
            raise ModelError(
                f"layer_types has {one!r} for layer {index}, with sliding_window = {window!r}: give "
                f"{' or '.join(map(repr, LAYER_TYPES))}, the second with a sliding_window."
            )
    return [window if one == LAYER_TYPES[1] else None for one in types]


def _require_known_parts(attn: Any, family: Family) -> None:
    """Raise ModelError where an attention module has submodules that `family` does not declare."""
    joined = family.query_key_value
    known = {"o_proj", *(("q_proj", "k_proj", "v_proj") if joined is None else (joined,))}
    if family.head_norms != "none":
        known.update(("q_norm", "k_norm"))
    others = [name for name, one in attn.named_children() if name not in known and [*one.parameters()]]
    if others:
        raise ModelError(
            f"{type(attn).__name__} has {listed(others)}, and the family does not say what the model does "
            "with it: declare head_norms where they are q_norm and k_norm."
        )


def _require_norms_of_all_heads(attn: Any) -> None:
    """Raise ModelError where a norm of all heads has another size than what it normalizes."""
    for name, linear in (("q_norm", "q_proj"), ("k_norm", "k_proj")):
        sizes = len(getattr(attn, name).weight), len(getattr(attn, linear).weight)
        if sizes[0] != sizes[1]:
            raise ModelError(
                f"{name} normalizes {sizes[0]} features, and {linear} gives {sizes[1]}: set head_dim to "
                "hidden_size / num_attention_heads, or leave it out."
            )


class Attention(InitializedLayer):
    """`[batch, length, hidden]` → the same shape: x + causal attention(x), with its norms and dropout."""

    def __init__(self, block: Any, family: Family, rotary: Rotary, window: int | None, std: float) -> None:
        super().__init__(std, {"sinks": std}, norm_start=family.norm_start)
        self.branch = add_branch(self, block, family.attention)
        attn = block.self_attn
        _require_known_parts(attn, family)
        self.self_attn: Any = attention_parts(attn, plain_norms=family.head_norms == "joint")
        self.joined, self.head_norms = family.query_key_value, family.head_norms
        self.rotary, self.window = rotary, window
        self.context: int = attn.config.max_position_embeddings
        self.rotates = bool(getattr(attn, "use_rope", True))
        # A module instead of transformers' function, so that it can be replaced and has a name.
        self.attention_dropout = nn.Dropout(attn.attention_dropout)
        self.attention_dropout.train(attn.training)
        self.cap: float | None = getattr(attn, family.score_cap) if family.score_cap else None
        if self.rotates and not family.rotates_part:
            rotary.require_all_features(attn.head_dim)
        if family.head_norms == "joint":
            _require_norms_of_all_heads(attn)

    def forward(self, x: Tensor) -> Tensor:
        """Return x plus the attention's output. With `tp` above 1, each rank has some of the heads."""
        return residual(self, x, self.branch, self._attention)

    def _attention(self, normed: Tensor) -> Tensor:
        attn = self.self_attn
        count = attn.o_proj.weight.shape[1] // attn.head_dim  # of query heads on this rank
        project_query, key, value = self._projections(normed, count)
        key, value = self._prepared(key, "k_norm", normed), heads_of(value, attn.head_dim)
        keys = share_keys(key, value, window=self.window, query_heads=count)
        query = self._prepared(project_query(), "q_norm", normed)  # while keys and values are sent
        options: Any = {"softcap": self.cap, "dropout": self.attention_dropout}
        mixed = attend(query, keys, scale=attn.scaling, sinks=getattr(attn, "sinks", None), **options)
        output: Tensor = attn.o_proj(mixed.transpose(1, 2).flatten(2))
        return output

    def _projections(self, normed: Tensor, count: int) -> tuple[Callable[[], Tensor], Tensor, Tensor]:
        """Return a function that returns queries, and keys and values: each `[batch, length, heads · size]`.

        `count`: of the query heads.
        """
        attn = self.self_attn
        if self.joined is None:
            return lambda: attn.q_proj(normed), attn.k_proj(normed), attn.v_proj(normed)
        every: Tensor = attn.get_submodule(self.joined)(normed)
        width = count * attn.head_dim
        query, key, value = torch.split(every, [width, *[(every.shape[-1] - width) // 2] * 2], -1)
        return lambda: query, key, value

    def _prepared(self, projected: Tensor, norm: str, like: Tensor) -> Tensor:
        """Return queries or keys by head, normalized and rotated: `[batch, heads, length, size]`."""
        if self.head_norms == "joint":
            projected = self.self_attn.get_submodule(norm)(projected)
        heads = heads_of(projected, self.self_attn.head_dim)
        if self.head_norms == "each":
            heads = self.self_attn.get_submodule(norm)(heads)
        return rotate_first(heads, *self.rotary(like)) if self.rotates else heads

    def cost(self) -> float:
        """Return the number of multiplications per token, by which layers are divided into stages."""
        seen = min(self.context, self.window or self.context)
        width = self.self_attn.config.num_attention_heads * self.self_attn.head_dim
        return attention_cost(self, seen, width)


def require_declared(config: Any, family: Family) -> None:
    """Raise ModelError if `config` sets an option, such as a window, that `family` does not declare."""
    declared = {family.score_cap, family.logit_cap, family.bidirectional, *family.ignored}
    if family.windows != "none":
        declared.add("sliding_window")
    if family.attention.dropout is not None and family.mlp.dropout is not None:
        declared.update(_DROPOUTS)
    for key, neutral in _UNDECLARED.items():
        value = getattr(config, key, None)
        if key not in declared and value not in neutral:
            raise ModelError(
                f"the configuration has {key} = {value!r}, and the family does not say what the model does "
                f"with it: declare windows, score_cap, logit_cap or the dropouts of branches, or "
                f"ignored=({key!r},) if its code does not read it."
            )
