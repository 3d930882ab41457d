"""`Framework`: how the frameworks of the published runs run a step, where they differ from plait."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Framework:
    """How a training framework runs a step, beyond what a `Plan` sets: fused operations, overlap, memory.

    Common to them: each layer's weight gradient follows its input gradient (`Plan.overlap`), linears of one
    input are not joined as plait's are, and `full` recomputation keeps the input of a block, attention and
    MLP, and repeats it to its end.
    """

    product_precision: str | None = None
    """Precision of the inputs of matrix products, such as `fp8`; None: the plan's."""
    fused_attention: bool = True
    """Attention in one kernel that keeps no matrix of scores; False: products, softmax and dropout."""
    elementwise_passes: float = 1.0
    """Bytes of element-wise operations, as a multiple of those with one kernel for each operation of the
    layer's formula; below 1 where a compiler fuses them."""
    recomputes_attention_only: bool = False
    """Whether `selective` recomputes the scores of attention only, as Megatron-LM does."""
    overlaps_tensor_sums: bool = True
    """Whether weight gradients run during the sum of input gradients over `tp`."""
    overlaps_tensor_products: bool = False
    """Whether gathers and reduce-scatters over `tp` run during the products that need them, in parts."""
    overlaps_data_sums: bool = True
    """Whether gradients are summed over data-parallel ranks during the last backward."""
    blocking_messages: bool = False
    """Whether a rank waits while it sends to the next stage."""
    messages_divided: bool = False
    """Whether each rank of `tp` sends its part of a stage's output, which receivers gather inside the host,
    and frees the rest; always so under sequence parallelism."""
    frees_gathered: bool = True
    """Whether sharded parameters are gathered for every forward and backward; False: once a step."""
    fused_loss: bool = False
    """Whether the loss works on the logits in place, without copies in fp32."""
    loss_metrics: int = 0
    """Metrics that compute the cross-entropy once more after each backward, unfused and without gradients."""
    fused_gate: bool = False
    """Whether activation and product of a gated MLP are one operation, of which only the inputs are kept."""
    placeholder_gradients: Literal["none", "sizes", "all"] = "none"
    """Which gradients in the compute precision are kept beside the accumulated ones: for every size of
    linear one that stands for it in autograd, as Transformer Engine's `get_dummy_wgrad` does; or those of
    all parameters, as DeepSpeed's optimizer for bf16."""


MEGATRON_2021 = Framework(
    fused_attention=False,
    overlaps_tensor_sums=False,
    overlaps_data_sums=False,
    blocking_messages=True,
    messages_divided=True,
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
FSDP = Framework(overlaps_tensor_sums=False)
LLM_FOUNDRY = replace(FSDP, fused_loss=True, loss_metrics=2)
"""MPT under FSDP, by the defaults of its model (mosaicml/llm-foundry, llmfoundry/models/mpt/modeling_mpt.py),
which the files of its runs (scripts/train/yamls/mpt) do not change: `loss_fn` is `fused_crossentropy`, and by
`use_train_metrics` Composer computes a cross-entropy and a perplexity of each micro-batch's logits."""
LLAMA_3_FSDP = replace(FSDP, fused_gate=True, overlaps_tensor_sums=True)
"""Llama 3's training (arXiv:2407.21783, section 3.3.2): FSDP that gathers once a step, messages that do not
block, tensor parallelism as Korthikanti et al.'s."""
MEGATRON_CORE = Framework(
    overlaps_data_sums=False,
    blocking_messages=True,
    fused_loss=True,
    fused_gate=True,
    placeholder_gradients="sizes",
)
"""Megatron Core with Transformer Engine, without overlap beyond Korthikanti et al.'s, as SimuMax ran it."""
MIXED = {"precision": "fp16", "master_precision": "fp32", "gradient_precision": "fp16", "overlap": True}
MIXED_32 = {"precision": "bf16", "master_precision": "fp32", "overlap": True}
"""Precisions of the plans of published runs, whose backwards go layer by layer."""
