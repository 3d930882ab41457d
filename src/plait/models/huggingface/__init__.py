"""Unmodified models of Hugging Face's transformers as sequences of layers, which plait can parallelize.

The layers hold the model's own modules (embeddings, linears, norms, activations), under the same names,
neither copied nor altered. Only residual connections, positions and causal attention are plait's code.
"""

from plait.models.huggingface.adapter import from_huggingface

__all__ = ["from_huggingface"]
