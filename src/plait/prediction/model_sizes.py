"""`decoder_of`: the sizes of one of plait's own models, read from its modules."""

from __future__ import annotations

from typing import Any

from plait.errors import ModelError
from plait.prediction.decoder import Decoder


def decoder_of(model: object) -> Decoder:
    """Return a `Decoder` with the sizes of `model`, which `plait.models.gpt2` or `llama` has made.

    Only shapes are read: the model may be on the meta device. Raises ModelError for another model, and for
    one whose blocks differ.
    """
    if isinstance(model, Decoder):
        return model
    found: Any = model
    try:
        token, blocks, head = found.embedding.token, list(found.blocks), found.head.output
        sizes = {_sizes(block) for block in blocks}
        context = int(found.context)
    except (AttributeError, TypeError):
        raise ModelError(
            f"the sizes of {type(model).__name__} are not known: give a model of plait.models.gpt2 or "
            "llama, or its sizes as plait.prediction.decoder.Decoder(...)."
        ) from None
    if len(sizes) != 1:
        raise ModelError(
            f"the blocks of the model have {len(sizes)} different sizes: predict needs equal blocks."
        )
    heads, kv_heads, inner, gated, biases = sizes.pop()
    return Decoder(
        layers=len(blocks),
        hidden=token.embedding_dim,
        heads=heads,
        kv_heads=kv_heads,
        inner=inner,
        vocab=token.num_embeddings,
        context=context,
        gated=gated,
        biases=biases,
        positions=hasattr(found.embedding, "position"),
        rotary=hasattr(blocks[0].attention, "rope_base"),
        tied=head.weight is token.weight,
    )


def _sizes(block: Any) -> tuple[int, int, int, bool, bool]:
    """Return heads, key heads, inner width, whether the MLP is gated, and whether linears have biases."""
    attention, mlp = block.attention, block.mlp
    gated = hasattr(mlp, "gate")
    up = mlp.up
    heads = int(attention.heads)
    kv_heads = int(getattr(attention, "kv_heads", heads))
    return heads, kv_heads, int(up.out_features), gated, up.bias is not None
