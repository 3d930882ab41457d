"""`calibrate`: measures the machine that it runs on, and writes a hardware file for predictions."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import torch

from plait.calibration.device_rates import SECONDS, DeviceRates, measure_device
from plait.calibration.hardware_text import hardware_text
from plait.calibration.link_rates import LinkRates, measure_links
from plait.comm.collectives import barrier
from plait.comm.group import Group
from plait.comm.launch import launch
from plait.comm.mesh import GridMesh, Mesh
from plait.comm.transport.world_ranks import current_ranks
from plait.comm.world import find_world
from plait.composer import parallelize
from plait.device import is_accelerator, multiprocessors, name_of, total_memory, visible_accelerators
from plait.errors import ConfigError
from plait.models import gpt2
from plait.plan import Plan
from plait.prediction.decoder import Decoder
from plait.prediction.hardware import Efficiency, Hardware, Link
from plait.prediction.operations import Product
from plait.prediction.roofline import product_efficiency
from plait.prediction.step_prediction import predict
from plait.tensor.losses import cross_entropy

SMALL = Decoder(layers=8, hidden=32, heads=2, vocab=64, context=16, biases=True, positions=True)
"""A model whose step takes hardly more than what plait and torch spend on each operation."""
LARGE = Decoder(layers=2, hidden=320, heads=5, vocab=1536, context=128, biases=True, positions=True)
"""A model whose step is spent on matrix products, and reads memory between them."""
_PLAN = Plan(microbatches=4)
_ROWS = 8
"""Plan and sequences of a step of either model."""
_TURNS = 10
"""Repetitions after which rates and fixed cost no longer change each other."""


@dataclass(frozen=True)
class RankMeasurement:
    """Figures of one rank's device and links, measured while all ranks of its host measured theirs."""

    device: str
    accelerated: bool
    memory: int
    """Bytes of the device; of a CPU its part of the host's memory."""
    host_memory: int
    devices: int
    """Ranks of the host."""
    multiprocessors: int
    rates: DeviceRates
    small_step: float
    """Seconds of forward and backward of a small model, `large_step`: of a larger one; 0 on a GPU."""
    large_step: float
    inside: LinkRates | None
    across: LinkRates | None


def calibrate(file: Path, ranks: int | None = None, *, seconds: float = SECONDS) -> Hardware:
    """Measure this machine with all its ranks at once, write `file`, and return its content.

    `ranks`: of this host, by default one for each GPU, or each core; a launcher's ranks on all hosts.
    `seconds`: for each of a dozen figures. Communication: all-reduces inside each host, and between hosts.
    Raises ConfigError where the file cannot be written.
    """
    alone = find_world() is None
    count = (ranks or visible_accelerators() or os.cpu_count() or 1) if alone else None
    found = launch(_measure, seconds, ranks=count, threads=None if visible_accelerators() else 1)
    hardware = hardware_of(found)
    try:
        file.write_text(hardware_text(hardware), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written ({error.strerror}): give another file.") from None
    return hardware


def _measure(seconds: float) -> RankMeasurement:
    world, ranks = find_world(), current_ranks()
    size = 1 if ranks is None else ranks.size
    here = size if world is None or size % world.local_size else world.local_size
    mesh = GridMesh(hosts=size // here, local=here)
    device, accelerated = mesh.device, is_accelerator(mesh.device)
    group = mesh.group("local")
    host_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return RankMeasurement(
        device=name_of(device) if accelerated else "CPU",
        accelerated=accelerated,
        memory=total_memory(device) if accelerated else host_memory // here,
        host_memory=host_memory,
        devices=here,
        multiprocessors=multiprocessors(device),
        rates=measure_device(device, seconds),
        small_step=0.0 if accelerated else _median_seconds(reference_step(SMALL, group), 50),
        large_step=0.0 if accelerated else _median_seconds(reference_step(LARGE, group), 12),
        inside=measure_links(group, device),
        across=measure_links(mesh.group("hosts"), device),
    )


def reference_step(sizes: Decoder, group: Group) -> Callable[[], object]:
    """Return a function that runs forward and backward of a model on each rank of a group, on the CPU.

    It returns when all ranks are done. Communication: a barrier.
    """
    model = gpt2(
        layers=sizes.layers,
        hidden=sizes.hidden,
        heads=sizes.heads,
        vocab=sizes.vocab,
        context=sizes.context,
    )
    engine = parallelize(model, _PLAN, Mesh(_PLAN, device="cpu", alone=True), loss=cross_entropy)
    tokens = torch.zeros(_ROWS, sizes.context, dtype=torch.int64)

    def run() -> None:
        engine.forward_backward(tokens, tokens)
        barrier(group, checked=False).wait()

    return run


def _median_seconds(run: Callable[[], object], times: int) -> float:
    """Return the median time of `run`, which all ranks call equally often."""
    run()
    found = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return median(found)


def hardware_of(found: Sequence[RankMeasurement]) -> Hardware:
    """Return the description of the machine that ranks have measured: their medians, the smallest memory."""
    first = found[0]
    rates = [one.rates for one in found]
    best = "bf16" if first.accelerated else "fp32"
    inside = [one.inside for one in found if one.inside]
    across = [one.across for one in found if one.across]
    links = inside or across
    near = _link(inside) or Link(1e12, 1e-7)
    middle = {name: median(one.products[name] for one in rates) for name in rates[0].products}
    bandwidth = median(one.memory_bandwidth for one in rates)
    efficiency = Efficiency(
        product=1.0,
        half_depth=median(one.half_depth for one in rates),
        attention=1.0,
        attention_backward=1.0,
        memory=1.0,
        elementwise=min(1.0, median(one.elementwise for one in rates) / bandwidth),
        optimizer=min(1.0, median(one.optimizer for one in rates) / bandwidth),
        kernel=median(one.kernel for one in rates),
        host=median(one.launch for one in rates),
        collective=median(one.start for one in links) if links else 0.0,
        inside=1.0,
        across=1.0,
        all_to_all=median(one.all_to_all for one in links) if links else 1.0,
    )
    made = Hardware(
        name=first.device,
        devices=first.devices,
        memory=min(one.memory for one in found),
        reserved=2.5 * 2**30 if first.accelerated else 0.0,
        host_memory=first.host_memory,
        multiprocessors=first.multiprocessors,
        memory_bandwidth=bandwidth,
        peak=middle,
        inside=near,
        across=_link(across) or near,
        oversubscription=1.0,
        overlaps=first.accelerated,
        efficiency=efficiency,
        fitted=f"{datetime.now(UTC):%Y-%m-%d}: measured by plait plan --calibrate on {len(found)} ranks",
    )
    side = rates[0].side
    shape = product_efficiency(Product(side, side, side), made)
    peak = {name: rate / shape for name, rate in middle.items()}
    efficiency = replace(
        efficiency,
        attention=min(1.0, median(one.attention for one in rates) / peak[best]),
        attention_backward=min(1.0, median(one.attention_backward for one in rates) / peak[best]),
    )
    made = replace(made, peak=peak, efficiency=efficiency)
    if first.accelerated:
        return made
    small, large = median(one.small_step for one in found), median(one.large_step for one in found)
    return _fitted_to_steps(made, small, large)


def _link(found: Sequence[LinkRates]) -> Link | None:
    if not found:
        return None
    return Link(median(one.bandwidth for one in found), median(one.latency for one in found))


def _fitted_to_steps(hardware: Hardware, small: float, large: float) -> Hardware:
    """Return `hardware` with rates and a fixed cost that predict `small` and `large` seconds for two models.

    From the small model's follows the fixed cost of an operation, from the other's how much slower products
    and memory are than in the operations alone: in a step, operands are not in the caches.
    """
    for _ in range(_TURNS):  # each has a little influence on the other model's step
        base = predicted_step(SMALL, _with_kernel(hardware, 0.0))
        slope = predicted_step(SMALL, _with_kernel(hardware, 1.0)) - base
        hardware = _with_kernel(hardware, max((small - base) / slope, 0.0))
        slower = large / predicted_step(LARGE, hardware)
        hardware = replace(
            hardware,
            peak={name: rate / slower for name, rate in hardware.peak.items()},
            memory_bandwidth=hardware.memory_bandwidth / slower,
        )
    return hardware


def _with_kernel(hardware: Hardware, kernel: float) -> Hardware:
    return replace(hardware, efficiency=replace(hardware.efficiency, kernel=kernel))


def predicted_step(sizes: Decoder, hardware: Hardware) -> float:
    """Return the seconds predicted for forward and backward of a model, as `reference_step` runs them."""
    found = predict(sizes, _PLAN, hardware, rows=_ROWS)
    return found.step_seconds - found.breakdown["optimizer"]
