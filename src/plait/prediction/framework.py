"""`Framework`: how a framework runs a step, where plait and others differ."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

from plait.plan import Plan
from plait.prediction.hardware import Hardware


@dataclass(frozen=True, kw_only=True)
class Framework:
    """How a training framework runs a step, beyond what a `Plan` sets: fused operations, overlap, memory.

    The defaults describe plait; other settings describe the frameworks of published runs.
    """

    product_precision: str | None = None
    """Precision of the inputs of matrix products, such as `fp8`; None: the plan's."""
    fused_attention: bool = True
    """Attention in one kernel that keeps no matrix of scores; False: products, softmax and dropout."""
    attention_dropout: bool = False
    """Whether unfused attention draws a dropout of its weights."""
    skips_masked: bool = True
    """Whether causal attention leaves out what the mask hides; unfused attention never does."""
    composes_operations: bool = False
    """Whether RMS norms, rotations and gated activations are several operations each, as on a CPU; such norms
    keep copies in fp32."""
    joins_linears: bool = False
    """Whether linears that read the same input are one product, of which the outputs are parts, unless
    sequences are cut."""
    layer_by_layer: bool = False
    """Whether full backwards compute each layer's weight gradient at once; False: as `Plan.overlap` says."""
    elementwise_passes: float = 1.0
    """Bytes of element-wise operations, as a multiple of those with one kernel for each operation of the
    layer's formula; below 1 where a compiler fuses them."""
    operations_per_layer: float = 1.0
    """Operations that the host starts, as a multiple of those of the layer's formula."""
    recomputes_attention_only: bool = False
    """Whether `selective` recomputes the scores of attention only, as Megatron-LM does."""
    overlaps_tensor_sums: bool = True
    """Whether weight gradients run during the sum of input gradients over `tp`."""
    overlaps_tensor_products: bool = False
    """Whether gathers and reduce-scatters over `tp` run during the products that need them, in pieces."""
    overlaps_data_sums: bool = True
    """Whether gradients are summed over data-parallel ranks during the last backward."""
    overlaps_gathers: bool = True
    """Whether the next layer's sharded parameters are gathered while a layer runs."""
    overlaps_context: bool = True
    """Whether ring attention computes while keys and values travel."""
    blocking_messages: bool = False
    """Whether a rank waits while it sends to the next stage."""
    messages_divided: bool = False
    """Whether each rank of `tp` sends its piece of a stage's output, which receivers gather inside the host,
    and frees the rest; always so under sequence parallelism."""
    frees_gathered: bool = True
    """Whether sharded parameters are gathered for every forward and backward; False: once a step."""
    moment_bytes: float | None = None
    """Bytes of optimizer state per parameter; None: two moments in the master precision."""
    optimizer_passes: float = 1.0
    """Memory traffic of the optimizer's step, as a multiple of one read and write of all its state."""
    fused_loss: bool = False
    """Whether the loss works on the logits in place, without copies in fp32."""
    fused_gate: bool = False
    """Whether activation and product of a gated MLP are one operation, of which only the inputs are kept."""
    placeholder_gradients: Literal["none", "sizes", "all"] = "none"
    """Which gradients in the compute precision are kept beside the accumulated ones: for every size of
    linear one that stands for it in autograd, as Transformer Engine's `get_dummy_wgrad` does; or those of
    all parameters, as DeepSpeed's optimizer for bf16."""
    recomputes_blocks: bool = False
    """Whether `full` keeps only the input of a block, attention and MLP, and not those of both."""
    recomputes_to_end: bool = False
    """Whether `full` repeats a layer's last product and its sum over `tp`, which no backward reads."""

    def weights_at_once(self, plan: Plan, *, sends: bool) -> bool:
        """Return whether a stage's full backward runs layer by layer, both gradients of each at once.

        Else all input gradients come first, see `Plan.overlap`. `sends`: whether another rank needs the last.
        """
        return self.layer_by_layer or (not sends if plan.overlap is None else plan.overlap)

    def sends_inputs_first(self, plan: Plan) -> bool:
        """Return whether full backwards run as input gradients, which are sent, and then weight gradients."""
        return plan.pp > 1 and not self.weights_at_once(plan, sends=True)

    def on(self, hardware: Hardware) -> Framework:
        """Return the framework's behaviour on `hardware`: on a CPU nothing is overlapped or fused."""
        if hardware.overlaps:
            return self
        names = (one.name for one in fields(self) if one.name.startswith("overlaps_"))
        return replace(self, composes_operations=True, **dict.fromkeys(names, False))  # type: ignore[arg-type]


PLAIT = Framework(joins_linears=True)
"""The behaviour of plait, for `predict`."""
