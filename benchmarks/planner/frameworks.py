"""How the frameworks of the published runs run a step, for `plait.predict`."""

from __future__ import annotations

from dataclasses import replace

from plait.prediction.framework import Framework

MEGATRON_2021 = Framework(
    fused_attention=False,
    attention_dropout=True,
    layer_by_layer=True,
    overlaps_tensor_sums=False,
    overlaps_data_sums=False,
    blocking_messages=True,
    messages_divided=True,
    recomputes_blocks=True,
    recomputes_to_end=True,
)
"""Megatron-LM of 2021: no flash attention, no overlap; blocks are recomputed whole."""
MEGATRON_2022 = replace(MEGATRON_2021, recomputes_attention_only=True, overlaps_tensor_sums=True)
"""Megatron-LM with sequence parallelism: selective recomputation leaves out the linears; sums over `tp` of a
backward, and gathers of inputs, run during products (Korthikanti et al. 2022, arXiv:2205.05198, 4.2.2)."""
DEEPSPEED = MEGATRON_2021
"""DeepSpeed's pipelines around Megatron-LM."""
DEEPSPEED_BF16 = replace(DEEPSPEED, placeholder_gradients="all")
"""With its optimizer for bf16, whose gradients of a micro-batch stay allocated beside the sums in fp32
(deepspeed/runtime/bf16_optimizer.py)."""
FSDP = Framework(
    layer_by_layer=True, overlaps_tensor_sums=False, recomputes_blocks=True, recomputes_to_end=True
)
LLAMA_3_FSDP = replace(FSDP, fused_gate=True, overlaps_tensor_sums=True)
"""Llama 3's training (arXiv:2407.21783, section 3.3.2): FSDP that gathers once a step, messages that do not
block, tensor parallelism as Korthikanti et al.'s."""
MEGATRON_CORE = Framework(
    layer_by_layer=True,
    overlaps_data_sums=False,
    blocking_messages=True,
    fused_loss=True,
    fused_gate=True,
    placeholder_gradients="sizes",
    recomputes_blocks=True,
    recomputes_to_end=True,
)
"""Megatron Core with Transformer Engine, without overlap beyond Korthikanti et al.'s, as SimuMax ran it."""
MIXED = {"precision": "fp16", "master_precision": "fp32", "gradient_precision": "fp16"}
MIXED_32 = {"precision": "bf16", "master_precision": "fp32"}
