"""What a step took: time, tokens, memory."""

from __future__ import annotations

import resource
import sys
import time

import torch
from torch import Tensor

from plait.comm.collectives import all_reduce
from plait.comm.mesh import Mesh
from plait.train.config import Config
from plait.train.flops import flops_per_token, peak_flops
from plait.train.model import build_model


class Meter:
    """Measures steps, with one wait for the device a step. `start` before a step, `row` after it."""

    def __init__(self, config: Config, mesh: Mesh, vocab: int) -> None:
        model = config.model
        self._tokens = config.train.batch * model.context
        self._flops = flops_per_token(
            build_model(model, vocab), layers=model.layers, hidden=model.hidden, context=model.context
        )
        self._peak = _peak(mesh, config.train.precision)
        self._mesh = mesh
        self._started = 0.0

    def start(self) -> None:
        """A step begins."""
        self._started = time.perf_counter()

    def row(self, step: int, loss: Tensor, norm: Tensor, rate: float) -> dict[str, float]:
        """The row of metrics of `step`, counted from 0, just run: equal on every rank but for the time.

        Communication: one number, all-reduced over the world. Waits for the device.
        """
        memory = torch.tensor([peak_memory(self._mesh.device)], dtype=torch.float64, device=loss.device)
        all_reduce(memory, self._mesh.group("world"), "max", checked=False).wait()
        numbers = torch.stack([loss.double(), norm.double(), memory[0]]).tolist()
        seconds = time.perf_counter() - self._started
        row = {
            "step": step + 1,
            "loss": numbers[0],
            "grad_norm": numbers[1],
            "lr": rate,
            "tokens": self._tokens,
            "step_seconds": seconds,
            "tokens_per_second": self._tokens / seconds,
            "peak_memory_bytes": int(numbers[2]),
        }
        if self._peak is not None:
            row["mfu"] = self._flops * self._tokens / seconds / self._peak
        return row


def _peak(mesh: Mesh, precision: str) -> float | None:
    """Operations a second of all devices of the mesh together, which are taken to be alike."""
    if mesh.device.type != "cuda":
        return None
    each = peak_flops(torch.cuda.get_device_name(mesh.device), precision)
    return None if each is None else each * mesh.size("world")


def peak_memory(device: torch.device) -> int:
    """Bytes at the peak so far: the allocator's on a GPU, the process's resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
