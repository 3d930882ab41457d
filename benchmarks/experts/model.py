"""The model and the data of both runs: a Qwen3-MoE of transformers with 9.2 million parameters."""

import torch
from torch import Tensor
from transformers import Qwen3MoeConfig

VOCAB, CONTEXT, BATCH = 4096, 256, 8


def config(layers: int = 4, *, dense: bool = False) -> Qwen3MoeConfig:
    """The model's configuration; `dense`: with MLPs as wide as the two experts of a token, and no router."""
    return Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=2 * 256,
        mlp_only_layers=[*range(layers)] if dense else [],
        moe_intermediate_size=256,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        use_cache=False,
    )


def batch(step: int, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Rows `first` to `last` of a step's batch: inputs and targets."""
    tokens = torch.randint(VOCAB, (BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(step))
    return tokens[first:last, :-1].contiguous(), tokens[first:last, 1:].contiguous()
