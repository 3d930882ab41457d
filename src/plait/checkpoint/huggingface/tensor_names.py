"""Which tensor of Hugging Face is which of plait's own models, as data.

GPT-2 of transformers keeps its matrices transposed (`Conv1D`: `[in, out]`), and those of query, key and value
in one, beside each other. Llama's are the same under other names; rotary embedding pairs the same features.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from plait.checkpoint.huggingface.model_sizes import ModelSizes


@dataclass(frozen=True)
class TensorPair:
    """A tensor of theirs, and what it is made of."""

    theirs: str
    ours: tuple[str, ...]
    """Names; of several, theirs has them beside each other along its last dim."""
    shape: tuple[int, ...]
    """Of each of ours."""
    transposed: bool = False

    @property
    def their_shape(self) -> tuple[int, ...]:
        """Of all of ours together."""
        *others, last = reversed(self.shape) if self.transposed else self.shape
        return (*others, last * len(self.ours))


@dataclass(frozen=True)
class Template:
    """A pair of every model of a family; `#` stands for the number of a block, words for sizes."""

    theirs: str
    ours: tuple[str, ...]
    shape: tuple[str, ...]
    transposed: bool = False


_QUERY_KEY_VALUE = tuple(f"blocks.#.attention.{one}" for one in ("query", "key", "value"))
GPT2 = (
    Template("transformer.wte.weight", ("embedding.token.weight",), ("vocab", "hidden")),
    Template("transformer.wpe.weight", ("embedding.position.weight",), ("context", "hidden")),
    Template("transformer.h.#.ln_1.weight", ("blocks.#.attention.norm.weight",), ("hidden",)),
    Template("transformer.h.#.ln_1.bias", ("blocks.#.attention.norm.bias",), ("hidden",)),
    Template(
        "transformer.h.#.attn.c_attn.weight",
        tuple(f"{one}.weight" for one in _QUERY_KEY_VALUE),
        ("hidden", "hidden"),
        transposed=True,
    ),
    Template(
        "transformer.h.#.attn.c_attn.bias", tuple(f"{one}.bias" for one in _QUERY_KEY_VALUE), ("hidden",)
    ),
    Template(
        "transformer.h.#.attn.c_proj.weight",
        ("blocks.#.attention.output.weight",),
        ("hidden", "hidden"),
        transposed=True,
    ),
    Template("transformer.h.#.attn.c_proj.bias", ("blocks.#.attention.output.bias",), ("hidden",)),
    Template("transformer.h.#.ln_2.weight", ("blocks.#.mlp.norm.weight",), ("hidden",)),
    Template("transformer.h.#.ln_2.bias", ("blocks.#.mlp.norm.bias",), ("hidden",)),
    Template(
        "transformer.h.#.mlp.c_fc.weight", ("blocks.#.mlp.up.weight",), ("inner", "hidden"), transposed=True
    ),
    Template("transformer.h.#.mlp.c_fc.bias", ("blocks.#.mlp.up.bias",), ("inner",)),
    Template(
        "transformer.h.#.mlp.c_proj.weight",
        ("blocks.#.mlp.down.weight",),
        ("hidden", "inner"),
        transposed=True,
    ),
    Template("transformer.h.#.mlp.c_proj.bias", ("blocks.#.mlp.down.bias",), ("hidden",)),
    Template("transformer.ln_f.weight", ("head.norm.weight",), ("hidden",)),
    Template("transformer.ln_f.bias", ("head.norm.bias",), ("hidden",)),
    Template("lm_head.weight", ("head.output.weight",), ("vocab", "hidden")),
)
LLAMA = (
    Template("model.embed_tokens.weight", ("embedding.token.weight",), ("vocab", "hidden")),
    Template("model.layers.#.input_layernorm.weight", ("blocks.#.attention.norm.weight",), ("hidden",)),
    Template(
        "model.layers.#.self_attn.q_proj.weight", ("blocks.#.attention.query.weight",), ("hidden", "hidden")
    ),
    Template(
        "model.layers.#.self_attn.k_proj.weight", ("blocks.#.attention.key.weight",), ("keys", "hidden")
    ),
    Template(
        "model.layers.#.self_attn.v_proj.weight", ("blocks.#.attention.value.weight",), ("keys", "hidden")
    ),
    Template(
        "model.layers.#.self_attn.o_proj.weight", ("blocks.#.attention.output.weight",), ("hidden", "hidden")
    ),
    Template("model.layers.#.post_attention_layernorm.weight", ("blocks.#.mlp.norm.weight",), ("hidden",)),
    Template("model.layers.#.mlp.gate_proj.weight", ("blocks.#.mlp.gate.weight",), ("inner", "hidden")),
    Template("model.layers.#.mlp.up_proj.weight", ("blocks.#.mlp.up.weight",), ("inner", "hidden")),
    Template("model.layers.#.mlp.down_proj.weight", ("blocks.#.mlp.down.weight",), ("hidden", "inner")),
    Template("model.norm.weight", ("head.norm.weight",), ("hidden",)),
    Template("lm_head.weight", ("head.output.weight",), ("vocab", "hidden")),
)
HEAD = "lm_head.weight"
"""That is not saved where it is the embedding's."""


def tensor_pairs(sizes: ModelSizes) -> list[TensorPair]:
    """All tensors of a model, block by block."""
    rows = [row for row in (GPT2 if sizes.family == "gpt2" else LLAMA) if not _is_shared(row, sizes)]
    found: list[TensorPair] = []
    for in_block, together in groupby(rows, lambda row: "#" in row.theirs):
        each = list(together)
        for block in range(sizes.layers if in_block else 1):
            found += [_pair(row, sizes, block) for row in each]
    return found


def _is_shared(row: Template, sizes: ModelSizes) -> bool:
    return sizes.tied and row.theirs == HEAD


def _pair(row: Template, sizes: ModelSizes, block: int) -> TensorPair:
    numbers = {
        "vocab": sizes.vocab,
        "hidden": sizes.hidden,
        "context": sizes.context,
        "inner": sizes.inner,
        "keys": sizes.kv_heads * (sizes.hidden // sizes.heads),
    }
    ours = tuple(name.replace("#", str(block)) for name in row.ours)
    shape = tuple(numbers[word] for word in row.shape)
    return TensorPair(row.theirs.replace("#", str(block)), ours, shape, row.transposed)
