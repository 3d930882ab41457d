"""Code shared by the converters: layers of several families, rotary positions, and refusals.

The layers hold most modules of a model and call them. The code of some they replace (the model, its blocks,
attention, rotary embedding): what a user changed there would be lost, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import ModelError, listed
from plait.models.layers.model_validation import refuse_compiled_modules
from plait.models.model_helpers import InitializedLayer, require_length
from plait.models.result_cache import ResultCache
from plait.models.rotary import Angles, angles_of_positions, rotate
from plait.tensor.find_module_hooks import call_hooks, has_own_forward

STEADY_ROTARY = ("default", "linear", "llama3", "proportional", "yarn")
"""Types of rotary embedding whose frequencies do not depend on the length of the sequence."""
ENTRANCE = "entrance"
"""The name of the module at which a branch without a norm in front enters its region."""
_LIBRARY = "transformers."


class Embedding(InitializedLayer):
    """Tokens `[batch, length]` → `[batch, length, hidden]`, without positions, which attention adds."""

    def __init__(
        self, name: str, table: nn.Module, context: int, std: float, emb_dropout: nn.Module | None = None
    ) -> None:
        """`name`: the attribute that holds `table`, as in the model of transformers."""
        super().__init__(std)
        self.name, self.context = name, context
        # A table that scales what it gives is a class of its own; the rule vocabulary takes plain ones.
        self.scale = _scale(table)
        self.add_module(name, table if self.scale is None else _plain(table))
        self.emb_dropout = emb_dropout

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embeddings. Raises ModelError for a sequence longer than the context."""
        require_length(tokens, self.context)
        embedded: Tensor = self.get_submodule(self.name)(tokens)
        if self.scale is not None:  # rounded as in transformers: to float32, then to the model's dtype
            scale = torch.tensor(self.scale, dtype=torch.float32, device="cpu").to(embedded.dtype)
            embedded = embedded * scale.item()
        return embedded if self.emb_dropout is None else self.emb_dropout(embedded)


def is_scaled(table: nn.Module) -> bool:
    """Return whether an embedding module of transformers multiplies its output by a factor."""
    return hasattr(table, "scalar_embed_scale")


def _scale(table: Any) -> float | None:
    """Return the factor of a scaled embedding of transformers: from its buffer, unless that is on meta."""
    if not is_scaled(table):
        return None
    return float(table.scalar_embed_scale if table.embed_scale.is_meta else table.embed_scale)


def _plain(table: Any) -> nn.Embedding:
    """Return an embedding without a scale that holds the weight of `table`."""
    plain = nn.Embedding(
        table.num_embeddings, table.embedding_dim, table.padding_idx, _weight=table.weight.detach()
    )
    plain.weight = table.weight
    return plain.train(table.training)


@dataclass(frozen=True)
class Branch:
    """The names in transformers of the norms and dropout around attention or MLP in a block."""

    before: str | None
    """The norm of its input."""
    after: str | None = None
    """The norm of its output."""
    dropout: str | None = None
    """The dropout of its output."""


def add_branch(layer: nn.Module, block: Any, branch: Branch) -> tuple[str, ...]:
    """Add to `layer` the modules of a block around attention or MLP; return their names, the first in front.

    Where no norm is in front, an identity is, at which the branch enters its region.
    """
    found = [name for name in (branch.before, branch.after, branch.dropout) if name is not None]
    for name in found:
        layer.add_module(name, getattr(block, name))
    if branch.before is not None:
        return tuple(found)
    layer.add_module(ENTRANCE, nn.Identity())
    return (ENTRANCE, *found)


def attention_parts(attn: Any, *, plain_norms: bool = False) -> Any:
    """Return a copy of an attention module (same parameters), with `layer_type` in place of `layer_idx`.

    Layers that differ in their number alone are alike then: those of each type are traced, proved and
    compiled once. With `plain_norms`, `q_norm` and `k_norm` are norms of torch with the same weights, which
    the rule `norm` takes: in float64 they compute in float64, where transformers takes float32.
    """
    result: Any = nn.Module()
    for name, module in attn.named_children():
        plain = plain_norms and name in ("q_norm", "k_norm")
        result.add_module(name, _plain_norm(module) if plain else module)
    for name, parameter in attn.named_parameters(recurse=False):
        result.register_parameter(name, parameter)
    for name, value in vars(attn).items():
        if not name.startswith("_") and name != "layer_idx":
            setattr(result, name, value)
    types = getattr(attn.config, "layer_types", None)
    result.layer_type = None if types is None else types[attn.layer_idx]
    return result


def _plain_norm(norm: Any) -> nn.RMSNorm:
    plain = nn.RMSNorm(norm.weight.shape, norm.variance_epsilon, device="meta")
    plain.weight = norm.weight
    return plain


def residual(
    layer: nn.Module, x: Tensor, names: tuple[str, ...], branch: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return `x` plus the output of a branch (attention or MLP), with its norms and dropout applied."""
    before, *behind = names
    output = branch(layer.get_submodule(before)(x))
    for name in behind:
        output = layer.get_submodule(name)(output)
    return x + output


class MLP(InitializedLayer):
    """`[batch, length, hidden]` → the same shape: x + MLP(x), with its norms and dropout."""

    def __init__(
        self,
        block: Any,
        branch: Branch,
        std: float,
        exceptions: Mapping[str, float] | None = None,
        *,
        norm_start: float = 1.0,
    ) -> None:
        super().__init__(std, exceptions, norm_start=norm_start)
        self.branch = add_branch(self, block, branch)
        self.mlp = block.mlp

    def forward(self, x: Tensor) -> Tensor:
        """Return x plus the MLP's output. With `tp` above 1, each rank's linears hold some features."""
        return residual(self, x, self.branch, self.mlp)


class Head(InitializedLayer):
    """`[batch, length, hidden]` → logits `[batch, length, vocab]`: the last norm and the output linear."""

    def __init__(
        self,
        name: str,
        norm: nn.Module,
        lm_head: nn.Module,
        std: float,
        *,
        cap: float | None = None,
        norm_start: float = 1.0,
    ) -> None:
        """`name`: the attribute that holds `norm`, as in the model of transformers; `cap`: of the logits."""
        super().__init__(std, norm_start=norm_start)
        self.name, self.cap = name, cap
        self.add_module(name, norm)
        self.lm_head = lm_head

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, capped to c · tanh(logits / c) where the model has a cap c."""
        logits: Tensor = self.lm_head(self.get_submodule(self.name)(x))
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


class Rotary(nn.Module):
    """Computes cosines and sines of rotary positions, equal to those of a rotary module of transformers.

    All layers of a model share one, so that they compute the angles once.
    """

    bits: Tensor

    def __init__(self, source: Any, layer_type: str | None = None) -> None:
        """Copy the frequencies of `source`; if on the meta device, compute them from its configuration.

        `layer_type`: of the layers, where `source` has frequencies for each type.
        """
        super().__init__()
        kind, prefix = source.rope_type, ""
        if layer_type is not None:
            kind, prefix = kind[layer_type], f"{layer_type}_"
        if kind not in STEADY_ROTARY:
            raise ModelError(
                f"the model's rotary embedding is of type {kind!r}, and plait computes angles that do not "
                f"depend on the length of a sequence: set rope_type to {', '.join(STEADY_ROTARY)}."
            )
        if getattr(source, f"{prefix}inv_freq").is_meta:
            with torch.device("cpu"):
                source = type(source)(source.config)
        self.scaling = float(getattr(source, f"{prefix}attention_scaling"))
        # As int32, which a plan's precision does not cast: 16-bit angles are wrong at distant positions.
        frequencies = getattr(source, f"{prefix}inv_freq").detach().to(torch.float32, copy=True)
        self.register_buffer("bits", frequencies.view(torch.int32), persistent=False)
        self.angles = ResultCache()

    @staticmethod
    def by_layer_type(source: Any) -> dict[str | None, Rotary]:
        """Return a model's rotary embeddings by layer type, under None if all layers share one."""
        types = source.rope_type if isinstance(source.rope_type, dict) else (None,)
        return {one: Rotary(source, one) for one in types}

    def require_all_features(self, size: int) -> None:
        """Raise ModelError unless the rotary embedding has an angle for each pair of `size` head features."""
        if 2 * len(self.bits) != size:
            raise ModelError(
                f"the model's rotary embedding rotates {2 * len(self.bits)} of a head's {size} features, "
                "and this class of transformers all: set partial_rotary_factor to 1."
            )

    def forward(self, like: Tensor) -> Angles:
        """Return cosines and sines `[length, frequencies]` of the positions along dim 1 of `like`.

        Positions as in `angles_of_positions`.
        """

        def compute(positions: Tensor) -> Angles:
            angles = positions * self.bits.view(torch.float32)
            return (angles.cos() * self.scaling).to(like.dtype), (angles.sin() * self.scaling).to(like.dtype)

        key, length = id(self.angles), like.shape[1]
        return angles_of_positions(key, compute, length, torch.float32, like, self.angles)


def rotate_first(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Apply the rotary embedding to the first features of each head, two per angle; keep the others."""
    rotated = 2 * cosines.shape[-1]
    if rotated == x.shape[-1]:
        return rotate(x, cosines, sines)
    return torch.cat((rotate(x[..., :rotated], cosines, sines), x[..., rotated:]), dim=-1)


def require_unmodified(model: Any, replaced: Iterable[nn.Module]) -> None:
    """Raise ModelError if a module that plait reimplements was altered, or is of another class.

    `replaced`: these modules. They are those of the model's own file in transformers, without hooks and with
    the `forward` of their class.
    """
    refuse_compiled_modules(model)
    paths = {id(module): path for path, module in model.named_modules()}
    for module in (model, *replaced):
        place, kind = paths.get(id(module)) or "the model", type(module)
        home = type(model).__module__
        if home.startswith(_LIBRARY) and kind.__module__ != home:
            raise ModelError(
                f"{place} is a {kind.__module__}.{kind.__qualname__}, whose code plait would not run: "
                "give an unmodified model, or write an nn.Sequential of its layers."
            )
        if has_own_forward(module) or not all(_is_of_transformers(hook) for _, hook in call_hooks(module)):
            raise ModelError(
                f"{place} ({kind.__name__}) has hooks or a forward of its own, which plait would not run: "
                "remove them, or put them on a linear, a norm or an MLP."
            )
        if getattr(module, "gradient_checkpointing", False):
            raise ModelError(
                f"activation checkpointing is on in {place}: turn it off on the model, and let the plan "
                'recompute layers, Plan(recompute="full").'
            )
    if getattr(model, "is_quantized", False):
        raise ModelError("the model is quantized, and plait trains full weights: load it unquantized.")
    _require_known_attention(model.config)


def _is_of_transformers(function: Any) -> bool:
    return (getattr(function, "__module__", None) or "").startswith(_LIBRARY)


def _require_known_attention(config: Any) -> None:
    """Raise ModelError for a function of attention that a user registered. Reads a private attribute."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = getattr(config, "_attn_implementation", None)
    function = ALL_ATTENTION_FUNCTIONS.get(name, None)
    if function is not None and not _is_of_transformers(function):
        raise ModelError(
            f"the model's attn_implementation is {name!r}, a function of {function.__module__}, and plait "
            "computes attention itself: build the model with 'sdpa' or 'eager'."
        )


def require_causal(config: Any, attentions: Iterable[Any], bidirectional: str | None = None) -> None:
    """Raise ModelError if the configuration or an attention module asks for attention that is not causal.

    `bidirectional`: the value of the configuration that asks for it, beside `is_causal`.
    """
    found = ["is_causal off in config"] if not getattr(config, "is_causal", True) else []
    if bidirectional is not None and getattr(config, bidirectional, None):
        found.append(f"{bidirectional} on in config")
    found += ["is_causal off in an attention" for one in attentions if not getattr(one, "is_causal", True)]
    if found:
        raise ModelError(
            f"the model attends to later positions ({found[0]}), where plait adapts causal decoders only: "
            "configure causal attention."
        )


def require_all_parameters(model: nn.Module, sequence: nn.Module) -> None:
    """Raise ModelError for parameters of `model` that none of the layers in `sequence` holds."""
    held = {id(one) for one in sequence.parameters()}
    others = [name for name, one in model.named_parameters() if id(one) not in held]
    if others:
        raise ModelError(
            f"the model has parameters that its layers do not use ({listed(others, most=4)}): remove them, "
            "or write an nn.Sequential of its layers."
        )
