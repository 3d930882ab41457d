"""Model FLOPs utilisation: how much of the devices' peak goes into the sums that the model asks for.

Counted as in "PaLM" (Chowdhery et al., 2022, appendix B): every weight of a matrix product costs 6
floating-point operations a token (2 forward, 4 backward) and attention adds 12 · layers · hidden · context.
What is computed twice, as with recomputation, is not counted twice.
"""

from __future__ import annotations

from torch import nn

# (part of the device's name, operations a second by precision), dense; the first match counts.
# From the makers' data sheets; fp32 means the plain fp32 units, since plait leaves TF32 off.
_PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    ("B200", {"bf16": 2250e12, "fp32": 75e12}),
    ("H100 PCIe", {"bf16": 756e12, "fp32": 51e12}),
    ("H100 NVL", {"bf16": 835e12, "fp32": 60e12}),
    ("GH200", {"bf16": 989e12, "fp32": 67e12}),
    ("H200", {"bf16": 989e12, "fp32": 67e12}),
    ("H100", {"bf16": 989e12, "fp32": 67e12}),
    ("A100", {"bf16": 312e12, "fp32": 19.5e12}),
    ("L40S", {"bf16": 362e12, "fp32": 91.6e12}),
    ("L40", {"bf16": 181e12, "fp32": 90.5e12}),
    ("L4", {"bf16": 121e12, "fp32": 30.3e12}),
    ("A10", {"bf16": 125e12, "fp32": 31.2e12}),
    ("RTX 4090", {"bf16": 165e12, "fp32": 82.6e12}),
)


def flops_per_token(model: nn.Module, *, layers: int, hidden: int, context: int) -> int:
    """Count the operations that training `model` on one token asks for, forward and backward.

    Its matrix products are those with all its matrices, a tied head's too; looking up an embedding costs
    nothing. Scores and mix of attention cost the same whether or not heads share keys and values.
    """
    weights = sum(
        parameter.numel()
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
        if parameter.dim() == 2
    )
    return 6 * weights + 12 * layers * hidden * context


def peak_flops(device_name: str, precision: str) -> float | None:
    """Look up the operations a second of one device; None where they are not known, as on a CPU."""
    for part, peaks in _PEAKS:
        if part.lower() in device_name.lower():
            return peaks.get(precision)
    return None
