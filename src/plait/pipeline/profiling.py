"""Ranges in torch's profiler."""

from __future__ import annotations

import torch


def profiling() -> bool:
    """Whether one of torch's profilers records on this thread.

    torch has no public way to ask; a range takes ten microseconds whether or not anybody looks.
    """
    return torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
