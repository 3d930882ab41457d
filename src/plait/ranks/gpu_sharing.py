"""Several ranks on one GPU: how many, NCCL's settings for it, and limits of memory.

NCCL lets ranks share a GPU from version 2.30 on (its variable `NCCL_MULTI_RANK_GPU_ENABLE`, experimental).
All of a GPU's ranks must fit there at once, so that each is given few thread blocks. The ranks take turns:
they compute what they compute on GPUs of their own, and their times say nothing about those.
"""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from plait.errors import MeshError
from plait.ranks.accelerator import (
    limit_memory,
    nccl_version,
)

OLDEST_NCCL = (2, 30)
"""The first version that lets ranks share a GPU."""


LIBRARY = "PLAIT_NCCL_LIBRARY"
"""The environment variable with the path of a newer NCCL than torch's."""


_COUNT = "PLAIT_RANKS_PER_GPU"


_SETTINGS = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2"}
"""NCCL's variables; eight ranks of two thread blocks an operation fit on a GPU, and more blocks did not."""


_CONTEXT = 2**30
"""Bytes of a GPU that a rank takes besides tensors: its CUDA context, NCCL's buffers."""


def ranks_per_gpu() -> int:
    """Return how many ranks share a GPU in this process's world: 1 unless `share_gpu` has said otherwise."""
    return int(os.environ.get(_COUNT, "1"))


def ranks_that_share(most: int, local_size: int, gpus: int) -> int:
    """Return how many of a host's `local_size` ranks share each of its `gpus`. Raises `MeshError`.

    Raises `MeshError` if that are more than `most`, or not the same number on each.
    """
    asked = f"up to {most} ranks per GPU were asked for"
    if not gpus:
        raise MeshError(f"{asked}, and this host has no GPU that NCCL can use: leave ranks_per_gpu out.")
    if local_size > gpus and local_size % gpus:
        raise MeshError(
            f"{asked}, and {local_size} ranks do not spread evenly over the {gpus} GPUs of this host: use a "
            "multiple of that, or show fewer GPUs by CUDA_VISIBLE_DEVICES."
        )
    if local_size > gpus * most:
        raise MeshError(
            f"{asked}, and this host has {local_size} ranks and {gpus} GPUs: use at most {gpus * most} ranks "
            f"there, or ranks_per_gpu = {local_size // gpus}."
        )
    if local_size > gpus and os.environ.get("NCCL_NVLS_ENABLE") == "1":
        raise MeshError(f"{asked}, which NCCL cannot do with NCCL_NVLS_ENABLE=1: unset that variable.")
    return max(1, local_size // gpus)


def newer_nccl() -> str | None:
    """Return the path of an NCCL to preload so that ranks can share a GPU; None if theirs can.

    Searched: the path in `PLAIT_NCCL_LIBRARY`, then the system's libraries. None also where there is no such
    library, so that the ranks refuse it.
    """
    if nccl_version() >= OLDEST_NCCL:
        return None
    given = os.environ.get(LIBRARY)
    if given is not None and not Path(given).is_file():
        raise MeshError(f"{LIBRARY} is {given!r}, where no file is: give the path of a libnccl.so.2.")
    for path in filter(None, (given, ctypes.util.find_library("nccl"))):
        if _version_of(path) >= OLDEST_NCCL:
            return path
    return None


def _version_of(library: str) -> tuple[int, ...]:
    """Return the version of an NCCL library, asked in a process of its own; () if it cannot be loaded."""
    program = (
        "import sys; from plait.ranks.accelerator import nccl_version; print(*nccl_version(sys.argv[1]))"
    )
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            [sys.executable, "-c", program, library], capture_output=True, text=True, timeout=60, check=True
        )
        return tuple(map(int, done.stdout.split()))
    return ()


def share_gpu(device: torch.device, count: int) -> None:
    """Set NCCL's variables and a memory limit, for this process to share its GPU with `count - 1` others.

    Call it before a process group is made. Sets NCCL's variables, unless they are set, and limits what this
    process may allocate to its part. Raises `MeshError` unless this process's NCCL lets ranks share a GPU.
    """
    if count > 1 and (version := nccl_version()) < OLDEST_NCCL:
        cuda = (torch.version.cuda or "13").partition(".")[0]
        raise MeshError(
            f"{count} ranks are to share a GPU, which NCCL lets them since 2.30, and this one is "
            f'{".".join(map(str, version))}: pip install "nvidia-nccl-cu{cuda}>=2.30", which replaces '
            f"torch's; or give the path of a newer libnccl.so.2 to plait.launch by {LIBRARY}, under a "
            "launcher to all ranks by LD_PRELOAD."
        )
    os.environ[_COUNT] = str(count)
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    limit_memory(device, count, besides=_CONTEXT)


@contextmanager
def explained_sharing() -> Iterator[None]:
    """Within the context, add to out-of-memory errors a note that several ranks share the GPU."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if (count := ranks_per_gpu()) > 1:
            error.add_note(
                f"{count} ranks share this GPU, and each may allocate 1/{count} of its memory less 1 GiB: "
                "use fewer ranks per GPU, or a smaller model."
            )
        raise


def hang_hint() -> str:
    """Return a hint for a timeout of ranks that share a GPU: what may be exhausted; "" for others."""
    if (count := ranks_per_gpu()) == 1:
        return ""
    blocks = os.environ.get("NCCL_MAX_CTAS", "as many as NCCL chooses")
    return (
        f" {count} ranks share a GPU, and all their pending operations must fit on it at once: perhaps they "
        f"do not (NCCL_MAX_CTAS is {blocks}); use fewer ranks per GPU, or a smaller NCCL_MAX_CTAS."
    )
