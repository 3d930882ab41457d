"""Unmodified models of Hugging Face's transformers as sequences of layers, which plait can parallelize.

The layers hold the model's own modules (embeddings, linears, norms, activations): same parameters, same
names inside, nothing copied and nothing altered. What plait writes itself is only what connects them:
residual connections, positions and causal attention.
"""

from plait.models.huggingface.adapter import from_huggingface

__all__ = ["from_huggingface"]
