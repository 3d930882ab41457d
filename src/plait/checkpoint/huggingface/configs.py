"""`config.json` of transformers from and to the sizes of plait's own models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

from plait.checkpoint.huggingface.model_sizes import ModelSizes
from plait.errors import CheckpointError

FILE = "config.json"
MOST_BLOCKS, MOST_SIZE = 10_000, 2**31 - 1
EPSILON = 1e-5
"""Epsilon of the norms of both families."""
FIXED: Mapping[str, Mapping[str, tuple[Any, tuple[Any, ...]]]] = {
    "gpt2": {
        "activation_function": ("gelu_new", ("gelu_new", "gelu_pytorch_tanh")),
        "layer_norm_epsilon": (EPSILON, (EPSILON,)),
        "scale_attn_weights": (True, (True,)),
        "scale_attn_by_inverse_layer_idx": (False, (False,)),
        "add_cross_attention": (False, (False,)),
    },
    "llama": {
        "hidden_act": ("silu", ("silu", "swish")),
        "rms_norm_eps": (1e-6, (EPSILON,)),
        "attention_bias": (False, (False,)),
        "mlp_bias": (False, (False,)),
    },
}
"""What is fixed in plait's own models, by key: the default of transformers, and the accepted values."""


def config_json(sizes: ModelSizes, dtype: str) -> dict[str, Any]:
    """Return the configuration with which transformers builds the same model."""
    shared = {
        "dtype": dtype,
        "vocab_size": sizes.vocab,
        "tie_word_embeddings": sizes.tied,
        "bos_token_id": None,  # the tokenizer is unknown here
        "eos_token_id": None,
    }
    if sizes.family == "gpt2":
        return shared | {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_positions": sizes.context,
            "n_embd": sizes.hidden,
            "n_layer": sizes.layers,
            "n_head": sizes.heads,
            "n_inner": sizes.inner,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": EPSILON,
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
        }
    return shared | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.hidden // sizes.heads,
        "hidden_act": "silu",
        "max_position_embeddings": sizes.context,
        "rms_norm_eps": EPSILON,
        "rope_parameters": {"rope_type": "default", "rope_theta": sizes.rope_base},
        "attention_bias": False,
        "mlp_bias": False,
    }


def read_config(folder: Path) -> dict[str, Any]:
    """Return the configuration in a folder. Raises CheckpointError where there is none."""
    try:
        config = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} has no {FILE}: give a folder as save_pretrained of transformers leaves it."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder / FILE} cannot be read ({error}): mend it.") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder / FILE} is not a configuration: give another folder.")
    return config


def sizes_from_config(config: Mapping[str, Any], where: Path) -> ModelSizes:
    """Return the sizes of the model with this configuration, read in the folder `where`.

    Raises CheckpointError for a model that is not exactly plait's own `gpt2` or `llama`.
    """
    kind = str(config.get("model_type"))
    if kind not in FIXED:
        raise CheckpointError(
            f"{where / FILE} is of a model of type {kind!r}, and plait itself has {' and '.join(FIXED)}: "
            "let `plait train --model.name FOLDER` read such a folder."
        )
    for key, (usual, allowed) in FIXED[kind].items():
        _require(config, where, key, config.get(key, usual), allowed)
    return _gpt2(config, where) if kind == "gpt2" else _llama(config, where)


def _gpt2(config: Mapping[str, Any], where: Path) -> ModelSizes:
    keys = {"layers": "n_layer", "hidden": "n_embd", "heads": "n_head", "vocab": "vocab_size"}
    sizes = {name: _size(config, where, key) for name, key in (keys | {"context": "n_positions"}).items()}
    inner = 4 * sizes["hidden"]
    _require(config, where, "n_inner", config.get("n_inner") or inner, (inner,))
    tied = config.get("tie_word_embeddings", True)
    return ModelSizes("gpt2", **sizes, kv_heads=sizes["heads"], inner=inner, tied=tied)


def _llama(config: Mapping[str, Any], where: Path) -> ModelSizes:
    keys = {
        "layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "inner": "intermediate_size",
        "vocab": "vocab_size",
        "context": "max_position_embeddings",
    }
    known = {key: value for key, value in config.items() if value is not None}
    known.setdefault("num_key_value_heads", config.get("num_attention_heads"))
    sizes = {name: _size(known, where, key) for name, key in keys.items()}
    head_dim = sizes["hidden"] // sizes["heads"]
    _require(config, where, "head_dim", config.get("head_dim") or head_dim, (head_dim,))
    rope = {"rope_theta": config.get("rope_theta", ModelSizes.rope_base)}  # as in older files
    for key in ("rope_scaling", "rope_parameters"):
        given = config.get(key) or {}
        if not isinstance(given, dict):
            raise CheckpointError(f"{where / FILE} has {key} = {given!r}: give an object with a rope_theta.")
        rope |= given
    _require(config, where, "rope_type", rope.get("rope_type", rope.get("type", "default")), ("default",))
    base = rope["rope_theta"]
    if not isinstance(base, int | float) or not 0 < base < inf:
        raise CheckpointError(f"{where / FILE} has rope_theta = {base!r}: give a number above 0.")
    tied = config.get("tie_word_embeddings", False)
    return ModelSizes("llama", **sizes, tied=tied, rope_base=float(base))


def _size(config: Mapping[str, Any], where: Path, key: str) -> int:
    size, most = config.get(key), MOST_BLOCKS if key in ("n_layer", "num_hidden_layers") else MOST_SIZE
    if type(size) is not int or not 1 <= size <= most:
        raise CheckpointError(
            f"{where / FILE} has {key} = {size!r}: give a whole number of at least 1, and at most {most}."
        )
    return size


def _require(config: Mapping[str, Any], where: Path, key: str, found: Any, allowed: tuple[Any, ...]) -> None:
    if found not in allowed:
        kind = config["model_type"]
        raise CheckpointError(
            f"{where / FILE} has {key} = {found!r}, and plait's own {kind} has {allowed[0]!r}: let "
            "`plait train --model.name FOLDER` read such a folder."
        )
