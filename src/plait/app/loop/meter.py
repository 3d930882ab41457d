"""Measurement of a step: time, tokens, memory, and model FLOPs utilization (MFU).

FLOPs are counted as in "PaLM" (Chowdhery et al., 2022, appendix B): every weight of a matrix product costs 6
floating-point operations a token (2 forward, 4 backward) and attention adds 12 · layers · hidden · context.
What recomputation computes twice is counted once. The peak is that of the linears' products: with linears in
float8 that of fp8, though other products are in the plan's precision.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from plait.estimate.time.hardware import gpu_peaks
from plait.plan.decoder_sizes import FLOPS, multiplications
from plait.plan.plan import Linears, Precision
from plait.ranks.accelerator import (
    StreamEvent,
    is_accelerator,
    name_of,
    peak_allocated,
    product_precision,
    read_later,
    sent,
)
from plait.ranks.collectives import all_gather
from plait.ranks.mesh import Mesh
from plait.tensor.experts.active_parameters import active_elements
from plait.tensor.experts.router_losses_of_step import ExpertLoad


@dataclass(frozen=True)
class StepTensors:
    """The results of a step as 0-d tensors on the device, equal on all ranks except `non_finite`."""

    loss: Tensor
    norm: Tensor
    """The gradient norm before clipping."""
    weight: Tensor
    """The divisor of the mean loss, such as the number of targets in the global batch."""
    non_finite: Tensor
    """Whether this rank's own loss and own gradients are not finite: bool `[2]`."""
    load: ExpertLoad | None = None
    """Losses of routers and choices of experts; None for a model without experts."""


@dataclass(frozen=True)
class ExpertMetrics:
    """Losses and token counts of a step's mixture-of-experts layers, on the CPU; empty without experts."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """Entries of the step's row, by name."""
    tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By path of each router: how many tokens of the step chose each expert."""
    sent: tuple[int, ...] = ()
    """Of each rank: the tokens that it sent to experts of other ranks, in all layers."""
    received: tuple[int, ...] = ()
    """Of each rank: the tokens that it received from other ranks for its experts."""


@dataclass(frozen=True)
class StepMetrics:
    """The numbers of a finished step, the same on every rank except for times."""

    row: dict[str, float]
    """The metrics."""
    signal: int
    """A signal to stop that a rank had received by the end of the step; 0: none."""
    loss_rank: int
    """The lowest rank whose own loss is not finite; the size of the world if there is none."""
    gradient_rank: int
    """The same for gradients."""
    norm_ranks: tuple[int, ...]
    """The ranks whose gradient norm is not finite: those of whole replicas, which compute one each."""
    blocked_seconds: tuple[float, ...]
    """Of each rank: how long its host was blocked in communication during the step; 0 on a GPU."""
    peak_memory: tuple[int, ...]
    """Of each rank: its peak memory so far, in bytes."""
    clock: float = 0.0
    """Seconds since the run began, as rank 0 has measured them."""
    experts: ExpertMetrics = field(default_factory=ExpertMetrics)
    """Of models with experts."""


class Meter:
    """Measures time, tokens, memory and MFU of each step, without waiting for the device.

    Call `start` before a step, `measure` after it.
    """

    def __init__(
        self,
        mesh: Mesh,
        precision: Precision | None,
        flops_per_token: float | None = None,
        linears: Linears | None = None,
    ) -> None:
        """With `flops_per_token`, and a device whose peak is known, rows hold `mfu`.

        The peak is that of products in `precision`, with `linears` of those in fp8.
        """
        each = gpu_peaks(name_of(mesh.device)) if is_accelerator(mesh.device) else {}
        peak = each.get(product_precision(precision or "fp32") if linears is None else "fp8")
        self._peak = None if peak is None else peak * mesh.size("world")  # devices are alike
        self._flops = flops_per_token
        self._mesh = mesh
        self._began = time.monotonic()
        self._started, self._blocked = StreamEvent(mesh.device, timed=True), 0

    def start(self) -> None:
        """Start the clock of a step."""
        self._started = StreamEvent(self._mesh.device, timed=True)
        self._blocked = self._mesh.traffic.blocked_nanoseconds

    def elapsed(self) -> float:
        """Return the seconds since the meter was made, by this rank's clock."""
        return time.monotonic() - self._began

    def measure(
        self,
        step: int,
        result: StepTensors,
        rate: float,
        *,
        tokens: int,
        data_seconds: float = 0.0,
        signal: int = 0,
    ) -> Callable[[], StepMetrics]:
        """End the clock of `step`, counted from 0; return a function that waits for its numbers.

        `signal`: one that this rank has received, or 0. `tokens`: of the global batch.
        `data_seconds`: for how long this rank has waited for its rows of the batch.
        Communication: an all-gather of eight numbers over the world.
        """
        mesh, device, world = self._mesh, self._mesh.device, self._mesh.size("world")
        blocked = 0 if is_accelerator(device) else mesh.traffic.blocked_nanoseconds - self._blocked
        own = [peak_memory_bytes(device), signal, blocked / 1e9, data_seconds, self.elapsed()]
        faulty = torch.cat([result.non_finite, ~result.norm.isfinite()[None]])
        numbers = torch.cat([sent(torch.tensor(own, dtype=torch.float64), device), faulty.double()])
        everyone = all_gather(numbers, mesh.group("world"), checked=False)
        of_all = everyone.about("the metrics of the step").wait().view(-1)
        same = torch.stack([result.loss.double(), result.norm.double(), result.weight.double()])
        read, read_experts = read_later(torch.cat([same, of_all])), _read_experts_later(result.load)
        started, ended = self._started, StreamEvent(device, timed=True)

        def finished() -> StepMetrics:
            loss, norm, weight, *rest = read().tolist()
            experts = read_experts()
            memory, signals, blocked, data, clocks, *faults, norms = (rest[column::8] for column in range(8))
            seconds = ended.milliseconds_since(started) / 1e3
            row = {
                "step": step + 1,
                "loss": loss,
                "grad_norm": norm,
                "lr": rate,
                "tokens": tokens,
                "trained_tokens": int(weight) if weight.is_integer() else weight,
                "step_seconds": seconds,
                "data_seconds": round(max(data), 6),
                "tokens_per_second": tokens / seconds,
                "peak_memory_bytes": int(max(memory)),
                **self._utilization(tokens / seconds),
                **experts.metrics,
            }
            loss_rank, gradient_rank = (next((r for r, bad in enumerate(of) if bad), world) for of in faults)
            return StepMetrics(
                row=row,
                signal=int(max(signals)),
                loss_rank=loss_rank,
                gradient_rank=gradient_rank,
                norm_ranks=tuple(rank for rank, one in enumerate(norms) if one),
                blocked_seconds=tuple(blocked),
                peak_memory=tuple(map(int, memory)),
                clock=clocks[0],
                experts=experts,
            )

        return finished

    def _utilization(self, tokens_per_second: float) -> dict[str, float]:
        """Return the model FLOPs utilization as an entry of a row, if it is known."""
        if self._peak is None or self._flops is None:
            return {}
        return {"mfu": self._flops * tokens_per_second / self._peak}


def _read_experts_later(load: ExpertLoad | None) -> Callable[[], ExpertMetrics]:
    """Start to copy the numbers of experts to the CPU; return a function that waits for them."""
    if load is None:
        return ExpertMetrics
    given = {"balance_loss": load.balance_loss, "z_loss": load.z_loss, "largest_expert_load": load.largest}
    metrics = {name: one.double()[None] for name, one in given.items() if one is not None}
    counts = [*load.tokens.values(), load.sent, load.received]
    read = read_later(torch.cat([*metrics.values(), *(one.double() for one in counts)]))

    def waited() -> ExpertMetrics:
        numbers = iter(read().tolist())
        row = {name: next(numbers) for name in metrics}
        *tokens, sent_rows, received = (tuple(int(next(numbers)) for _ in one) for one in counts)
        row["tokens_sent"] = sum(sent_rows)
        if load.forced_routing:
            row["forced_routing"] = 1
        return ExpertMetrics(row, dict(zip(load.tokens, tokens, strict=True)), sent_rows, received)

    return waited


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory so far in bytes: the allocator's on a GPU, the resident set size on a CPU."""
    if is_accelerator(device):
        return peak_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def flops_per_token(model: nn.Module, *, layers: int, hidden: int, context: int) -> float:
    """Return the floating-point operations to train `model` on one token, forward and backward.

    Matrix products are those with all its matrices, a tied head's too, but of experts only with those that
    a token passes through; looking up an embedding costs nothing. Attention costs the same whether or not
    heads share keys and values.
    """
    return FLOPS * multiplications(active_elements(model), context=context, width=layers * hidden)
