"""Makes torch raise an error where the host would wait for a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from plait.ranks.accelerator import is_accelerator


@contextmanager
def forbid_host_waits(device: torch.device) -> Iterator[None]:
    """Within the context, torch's operations that block the host until a GPU is done raise RuntimeError.

    These are reads of values (`item`, `nonzero`) and copies between a GPU and pageable memory; waits for
    events and `synchronize` are not among them. Applies to all threads of the process; on a CPU to none.
    """
    if not is_accelerator(device):
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
