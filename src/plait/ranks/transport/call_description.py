"""Text that describes a call's tensors, and the calls of ranks that differ, for errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch


def describe(tensor: torch.Tensor) -> str:
    """Return dtype and shape as text, e.g. `float32[4, 6]`."""
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, e.g. `float32`."""
    return str(dtype).removeprefix("torch.")


def shown(versions: Mapping[str, Sequence[int]]) -> str:
    """Return the ranks' differing texts as one text: `rank 0: …; ranks 1, 2: …`."""
    return "; ".join(
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: {text}"
        for text, ranks in versions.items()
    )
