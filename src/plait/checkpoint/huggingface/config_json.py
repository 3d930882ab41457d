"""The sizes of plait's own `gpt2` and `llama`, read from a checkpoint, and from and to config.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from math import inf, isfinite
from pathlib import Path
from typing import Any

from plait.checkpoint.manifest import Manifest, TensorEntry, section
from plait.errors import CheckpointError, ModelError, PlaitError
from plait.models.huggingface.weight_files import CONFIG as CONFIG
from plait.models.huggingface.weight_files import SIZE_KEYS, config_in
from plait.plan.decoder_sizes import MOST_BLOCKS, MOST_SIZE, ROPE_BASE, Decoder, Family

_BLOCK = re.compile(r"model\.blocks\.(\d+)\.attention\.norm\.weight")
_TOKEN, _POSITION = "model.embedding.token.weight", "model.embedding.position.weight"
Number = int | float
EPSILON = 1e-5
"""Epsilon of the norms of both families."""
FIXED: Mapping[str, Mapping[str, tuple[Any, tuple[Any, ...]]]] = {
    "gpt2": {
        "activation_function": ("gelu_new", ("gelu_new", "gelu_pytorch_tanh")),
        "layer_norm_epsilon": (EPSILON, (EPSILON,)),
        "scale_attn_weights": (True, (True,)),
        "scale_attn_by_inverse_layer_idx": (False, (False,)),
        "add_cross_attention": (False, (False,)),
        "is_causal": (True, (True,)),
    },
    "llama": {
        "hidden_act": ("silu", ("silu", "swish")),
        "rms_norm_eps": (1e-6, (EPSILON,)),
        "attention_bias": (False, (False,)),
        "mlp_bias": (False, (False,)),
        "is_causal": (True, (True,)),
    },
}
"""What is fixed in plait's own models, by key: the default of transformers, and the accepted values."""
SIZES: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        "layers": "n_layer",
        "hidden": "n_embd",
        "heads": "n_head",
        "vocab": "vocab_size",
        "context": "n_positions",
    },
    "llama": {**SIZE_KEYS, "kv_heads": "num_key_value_heads", "inner": "intermediate_size"},
}
"""The keys of sizes, by their names in `Decoder`."""


def sizes_from_manifest(
    manifest: Manifest,
    *,
    heads: int | None = None,
    context: int | None = None,
    rope_base: float | None = None,
) -> Decoder:
    """Return the sizes of plait's own `gpt2` or `llama` in a checkpoint, from shapes and saved state.

    Most follow from shapes. The number of heads, and for Llama the context and the base of the rotary
    embedding, are read from the state that `plait train` or an import saved, or must be given.
    Raises CheckpointError for another model, and where a size is unknown or contradicts the one given.
    """
    tensors = manifest.tensors
    _refuse_experts(any(".mlp.mixture." in name for name in tensors), CheckpointError)
    blocks = {int(found[1]) for name in tensors if (found := _BLOCK.fullmatch(name))}
    first = "model.blocks.0.{}.weight".format
    needed = {_TOKEN, first("attention.key"), first("mlp.up"), *({_POSITION} & tensors.keys())}
    if not all(name in tensors and len(tensors[name].shape) == 2 for name in needed):
        raise CheckpointError(
            "the checkpoint is of no gpt2 or llama of plait's own: if it is of a model of Hugging Face, give "
            "the folder of that model."
        )
    vocab, hidden = tensors[_TOKEN].shape
    state = section(manifest.state, "sizes") or section(manifest.state, "config", "model")
    saved = {name: value for name, value in state.items() if isinstance(value, Number) and isfinite(value)}
    heads = int(_one("heads", heads, saved, None))
    is_gpt2 = _POSITION in tensors
    default = tensors[_POSITION].shape[0] if is_gpt2 else None
    return _sizes(
        "the checkpoint",
        "gpt2" if is_gpt2 else "llama",
        layers=len(blocks),
        hidden=hidden,
        heads=heads,
        kv_heads=_kv_heads(tensors[first("attention.key")], hidden, heads),
        inner=tensors[first("mlp.up")].shape[0],
        vocab=vocab,
        context=int(_one("context", context, saved, default)),
        tied="model.head.output.weight" not in tensors,
        rope_base=float(_one("rope_base", rope_base, saved, ROPE_BASE)),
    )


def _sizes(where: object, family: Family, **sizes: Any) -> Decoder:
    """Return the sizes of a `gpt2` or `llama`. Raises CheckpointError where they do not fit each other."""
    try:
        return Decoder.of_family(family, **sizes)
    except ModelError as error:
        raise CheckpointError(f"{where} has sizes that no model has: {error}") from None


def _one(name: str, given: Number | None, saved: Mapping[str, Any], default: Number | None) -> Number:
    known: Number | None = saved.get(name)
    if given is not None and known is not None and known != given:
        raise CheckpointError(f"the checkpoint says that {name} is {known} and not {given}: leave it out.")
    found = next((value for value in (given, known, default) if value is not None), None)
    if found is None:
        raise CheckpointError(
            f"neither state nor shapes in the checkpoint say what {name} of the model is: give {name}."
        )
    return found


def _kv_heads(key: TensorEntry, hidden: int, heads: int) -> int:
    if heads < 1 or hidden % heads or key.shape[0] % (hidden // heads):
        raise CheckpointError(
            f"a model of {hidden} features, whose keys have {key.shape[0]}, cannot have {heads} heads: give "
            "heads as the model was built with."
        )
    return key.shape[0] // (hidden // heads)


def config_json(sizes: Decoder, dtype: str) -> dict[str, Any]:
    """Return the contents of the config.json from which transformers builds a model of these sizes.

    Raises ModelError for experts.
    """
    _refuse_experts(sizes.experts is not None, ModelError)
    is_gpt2 = sizes.family == "gpt2"
    numbers = {**asdict(sizes), "kv_heads": sizes.key_heads, "inner": sizes.inside}
    config = {
        "architectures": ["GPT2LMHeadModel" if is_gpt2 else "LlamaForCausalLM"],
        "model_type": sizes.family,
        "dtype": dtype,
        "tie_word_embeddings": sizes.tied,
        "bos_token_id": None,  # the tokenizer is unknown here
        "eos_token_id": None,
    }
    config |= {key: numbers[name] for name, key in SIZES[sizes.family].items()}
    config |= {key: allowed[0] for key, (_, allowed) in FIXED[sizes.family].items()}
    if is_gpt2:
        return config | {"n_inner": sizes.inside, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    rotary = {"rope_type": "default", "rope_theta": sizes.rope_base}
    return config | {"head_dim": sizes.head_size, "rope_parameters": rotary}


def _refuse_experts(has_experts: bool, kind: type[PlaitError]) -> None:
    """Raise an error of `kind` where plait's own llama has experts."""
    if has_experts:
        raise kind(
            "the model is plait's own llama with experts, of which plait writes no model of transformers: "
            "train a Mixtral in a folder, such as model.name = FOLDER, to export it."
        )


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of config.json in `folder`. Raises CheckpointError if missing or not readable."""
    try:
        return config_in(folder)
    except ModelError as error:
        raise CheckpointError(str(error)) from None


def sizes_from_config(config: Mapping[str, Any], where: Path) -> Decoder:
    """Return the sizes in the `config` of folder `where`; CheckpointError for a model not plait's own."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FIXED:
        raise CheckpointError(
            f"{where / CONFIG} is of a model of type {kind!r}, and plait itself has {' and '.join(FIXED)}: "
            "let `plait train --model.name FOLDER` read such a folder."
        )
    for key, (usual, allowed) in FIXED[kind].items():
        _require(config, where, key, config.get(key, usual), allowed)
    known = {key: value for key, value in config.items() if value is not None}
    known.setdefault("num_key_value_heads", known.get("num_attention_heads"))
    sizes = {name: _size(known, where, key) for name, key in SIZES[kind].items()}
    tied = config.get("tie_word_embeddings", kind == "gpt2")
    if not isinstance(tied, bool):
        raise CheckpointError(f"{where / CONFIG} has tie_word_embeddings = {tied!r}: give true or false.")
    if kind == "gpt2":
        inner = 4 * sizes["hidden"]
        _require(config, where, "n_inner", config.get("n_inner") or inner, (inner,))
        return _sizes(where / CONFIG, "gpt2", **sizes, kv_heads=sizes["heads"], inner=inner, tied=tied)
    head_dim = sizes["hidden"] // sizes["heads"]
    _require(config, where, "head_dim", config.get("head_dim") or head_dim, (head_dim,))
    return _sizes(where / CONFIG, "llama", **sizes, tied=tied, rope_base=_rope_base(config, where))


def _rope_base(config: Mapping[str, Any], where: Path) -> float:
    """Return the base of the rotary embedding. Raises CheckpointError for another type of embedding."""
    rope = {"rope_theta": config.get("rope_theta", ROPE_BASE)}  # as in older files
    for key in ("rope_scaling", "rope_parameters"):
        given = config.get(key) or {}
        if not isinstance(given, dict):
            raise CheckpointError(
                f"{where / CONFIG} has {key} = {given!r}: give an object with a rope_theta."
            )
        rope |= given
    _require(config, where, "rope_type", rope.get("rope_type", rope.get("type", "default")), ("default",))
    base = rope["rope_theta"]
    if isinstance(base, bool) or not isinstance(base, int | float) or not 0 < base < inf:
        raise CheckpointError(f"{where / CONFIG} has rope_theta = {base!r}: give a number above 0.")
    return float(base)


def _size(config: Mapping[str, Any], where: Path, key: str) -> int:
    size, most = config.get(key), MOST_BLOCKS if key in ("n_layer", "num_hidden_layers") else MOST_SIZE
    if type(size) is not int or not 1 <= size <= most:
        raise CheckpointError(
            f"{where / CONFIG} has {key} = {size!r}: give a whole number of at least 1, and at most {most}."
        )
    return size


def _require(config: Mapping[str, Any], where: Path, key: str, found: Any, allowed: tuple[Any, ...]) -> None:
    if not any(found == one and isinstance(found, bool) == isinstance(one, bool) for one in allowed):
        kind = config["model_type"]
        raise CheckpointError(
            f"{where / CONFIG} has {key} = {found!r}, and plait's own {kind} has {allowed[0]!r}: let "
            "`plait train --model.name FOLDER` read such a folder."
        )
