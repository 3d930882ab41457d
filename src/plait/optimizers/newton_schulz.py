"""The mathematics of Muon: matrices orthogonalized by Newton–Schulz iterations, the cost, learning rates.

    X ← X / ‖X‖          A = X Xᵀ          X ← a X + (b A + c A²) X       a few times, with few rows

Each iteration maps every singular value s to a s + b s³ + c s⁵, which the coefficients bring close to 1.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"
(https://kellerjordan.github.io/posts/muon), section "Definition"; `torch.optim.Muon`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias, cast

import torch
from torch import Tensor

from plait.errors import PlanError

Triple: TypeAlias = tuple[float, float, float]
"""The coefficients a, b and c of an iteration."""
RateScaling: TypeAlias = Literal["original", "match_rms_adamw"]
QUINTIC: Triple = (3.4445, -4.7750, 2.0315)
"""Those of Jordan et al., section "Newton-Schulz", which `torch.optim.Muon` has by default."""
ITERATIONS = 5
"""How many `torch.optim.Muon` has by default."""
EPSILON = 1e-7
"""The least norm by which a matrix is divided, as in `torch.optim.Muon`."""
RMS_OF_ADAMW = 0.2
"""The root mean square of a typical update of AdamW (Liu et al. 2025)."""


def coefficients_of_steps(coefficients: Triple | Sequence[Triple], steps: int) -> tuple[Triple, ...]:
    """Return the coefficients of each iteration: one triple for all of them, or a triple for each.

    A triple for each is what Polar Express has (Amsel et al. 2025, arXiv:2505.16932, section 4). Raises
    PlanError for another number of triples than `steps`.
    """
    given: Sequence[object] = coefficients if isinstance(coefficients, Sequence) else ()
    if len(given) == 3 and not any(isinstance(one, Sequence) for one in given):
        given = [given] * steps
    if len(given) != steps or not all(isinstance(one, Sequence) and len(one) == 3 for one in given):
        raise PlanError(
            f"ns_coefficients is {coefficients!r}, and ns_steps {steps}: give one triple for all steps, or a "
            "triple for each."
        )
    return tuple(cast(Sequence[Triple], given))


def orthogonalized(
    matrices: Tensor,
    coefficients: Triple | Sequence[Triple] = QUINTIC,
    steps: int = ITERATIONS,
    dtype: torch.dtype = torch.bfloat16,
    eps: float = EPSILON,
) -> Tensor:
    """Return matrices `[..., m, n]` with the singular vectors of `matrices` and singular values near 1.

    The result has `dtype`, in which all is computed. In bfloat16 that of a matrix has the bits of
    `torch.optim.Muon`'s. `coefficients`: see `coefficients_of_steps`.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    shape = matrices.shape[-2:]
    x = matrices.to(dtype).reshape(shape if matrices.numel() == shape.numel() else (-1, *shape))
    multiply = torch.addmm if x.dim() == 2 else torch.baddbmm  # 1.8 times as slow in bf16 on a CPU
    if tall:
        x = x.mT
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
    for a, b, c in coefficients_of_steps(coefficients, steps):
        gram = x @ x.mT
        x = multiply(x, multiply(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).reshape(matrices.shape)


def iteration_cost(rows: int, columns: int) -> int:
    """Return the multiplications of an iteration for a matrix: k² (2 l + k), with k the smaller of its sizes.

    Of its products X Xᵀ and (…) X have k² l each, and A² has k³.
    """
    least, most = sorted((rows, columns))
    return least * least * (2 * most + least)


def learning_rate_factor(scaling: RateScaling, out_features: int, in_features: int) -> float:
    """Return the factor on the learning rate for a matrix of these sizes.

    "original": √max(1, out / in), as Jordan et al. and `torch.optim.Muon` have it. "match_rms_adamw":
    0.2 √max(out, in), with which an update is as large as AdamW's (Liu et al. 2025, "Muon is Scalable for LLM
    Training", arXiv:2502.16982, section 2.2, equation 4). Raises PlanError for another name.
    """
    if scaling == "original":
        return math.sqrt(max(1.0, out_features / in_features))
    if scaling == "match_rms_adamw":
        return RMS_OF_ADAMW * math.sqrt(max(out_features, in_features))
    raise PlanError(f"adjust_lr_fn is {scaling!r}: choose 'original' or 'match_rms_adamw'.")
