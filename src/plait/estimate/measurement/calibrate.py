"""`calibrate`: measures the machine that it runs on, and writes a hardware file for predictions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from plait.errors import ConfigError
from plait.estimate.measurement.machine_rates import DeviceRates, LinkRates, measure_device, measure_links
from plait.estimate.measurement.measured_model_steps import StepSeconds, fitted_to_steps, measure_steps
from plait.estimate.measurement.timer import Timer
from plait.estimate.time.hardware import (
    Efficiency,
    Hardware,
    Link,
    bundled_name,
    hardware_text,
    load_hardware,
)
from plait.estimate.time.operation_times import Product, product_efficiency
from plait.ranks.accelerator import (
    is_accelerator,
    multiprocessors,
    name_of,
    total_memory,
    visible_accelerators,
)
from plait.ranks.launch.launch import launch
from plait.ranks.launcher_environment import find_world
from plait.ranks.mesh import GridMesh
from plait.ranks.transport.process_ranks import current_ranks

SECONDS = 0.4
"""Time spent on each figure."""
NOT_MEASURED = "; links were not measured, {} are in the file"
"""What is added to the text `fitted` where there was one rank."""


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
    steps: StepSeconds | None
    """Of models on a CPU; None on a GPU."""
    inside: LinkRates | None
    across: LinkRates | None


def calibrate(file: Path, ranks: int | None = None, *, seconds: float = SECONDS) -> Hardware:
    """Measure this machine with all its ranks at once, write `file`, and return its content.

    `ranks`: of this host, by default one for each GPU, or each core; a launcher's ranks on all hosts.
    `seconds`: for each of a dozen figures. Communication: all-reduces inside each host, and between hosts;
    with one rank the links of the bundled file for this device, and none where there is no such.
    Raises ConfigError where the file cannot be written.
    """
    alone = find_world() is None
    count = (ranks or visible_accelerators() or os.cpu_count() or 1) if alone else None
    found = launch(_measure, seconds, ranks=count, threads=None if visible_accelerators() else 1)
    hardware = hardware_of(found)
    try:
        file.write_text(hardware_text(hardware, links=knows_links(found)), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written ({error.strerror}): give another file.") from None
    return hardware


def _measure(seconds: float) -> RankMeasurement:
    world, ranks = find_world(), current_ranks()
    size = 1 if ranks is None else ranks.size
    here = size if world is None or size % world.local_size else world.local_size
    mesh = GridMesh(hosts=size // here, local=here)
    device, accelerated = mesh.device, is_accelerator(mesh.device)
    group, timer = mesh.group("local"), Timer.on(device, seconds)
    host_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return RankMeasurement(
        device=name_of(device) if accelerated else "CPU",
        accelerated=accelerated,
        memory=total_memory(device) if accelerated else host_memory // here,
        host_memory=host_memory,
        devices=here,
        multiprocessors=multiprocessors(device),
        rates=measure_device(timer),
        steps=None if accelerated else measure_steps(group, timer, divides=size == here),
        inside=measure_links(group, timer),
        across=measure_links(mesh.group("hosts"), timer),
    )


def knows_links(found: Sequence[RankMeasurement]) -> bool:
    """Return whether the link figures are known: measured here, or taken from a bundled file."""
    return _measured_links(found) or _bundled(found[0]) is not None


def _measured_links(found: Sequence[RankMeasurement]) -> bool:
    return any(one.inside or one.across for one in found)


def _bundled(one: RankMeasurement) -> Hardware | None:
    """Return the bundled description of a rank's device, if there is one."""
    name = bundled_name(one.device) if one.accelerated else "cpu-two-cores"
    return None if name is None else load_hardware(name)


def hardware_of(found: Sequence[RankMeasurement]) -> Hardware:
    """Return a `Hardware` from all ranks' measurements: their medians, and the smallest memory."""
    made = _measured_hardware(found)
    if _measured_links(found):
        return made
    known = _bundled(found[0])
    if known is None:
        return replace(made, fitted=made.fitted + NOT_MEASURED.format("none"))
    part = known.efficiency
    of_links = {name: getattr(part, name) for name in ("collective", "inside", "across", "all_to_all")}
    return replace(
        made,
        inside=known.inside,
        across=known.across,
        oversubscription=known.oversubscription,
        efficiency=replace(made.efficiency, **of_links),
        fitted=made.fitted + NOT_MEASURED.format(f"those of {known.name}"),
    )


def _measured_hardware(found: Sequence[RankMeasurement]) -> Hardware:
    first = found[0]
    ranks = "one rank" if len(found) == 1 else f"{len(found)} ranks"
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
        operands=1.0,
        elementwise=min(1.0, median(one.elementwise for one in rates) / bandwidth),
        activation=min(1.0, median(one.activation for one in rates) / bandwidth),
        optimizer=min(1.0, median(one.optimizer for one in rates) / bandwidth),
        kernel=median(one.kernel for one in rates),
        host=median(one.launch for one in rates),
        repetition=0.0,
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
        waiting_speedup=1.0,
        multiprocessors=first.multiprocessors,
        memory_bandwidth=bandwidth,
        peak=middle,
        inside=near,
        across=_link(across) or near,
        oversubscription=1.0,
        overlaps=first.accelerated,
        efficiency=efficiency,
        fitted=f"{datetime.now(UTC):%Y-%m-%d}: measured by plait plan --calibrate on {ranks}",
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
    steps = [one.steps for one in found if one.steps]
    return fitted_to_steps(made, _medians(steps)) if steps else made


def _medians(steps: Sequence[StepSeconds]) -> StepSeconds:
    divided = [one.divided for one in steps if one.divided is not None]
    pipelined = [one.pipelined for one in steps if one.pipelined is not None]
    return StepSeconds(
        median(one.small for one in steps),
        median(one.middle for one in steps),
        median(one.large for one in steps),
        median(one.recomputed for one in steps),
        median(divided) if divided else None,
        median(pipelined) if pipelined else None,
    )


def _link(found: Sequence[LinkRates]) -> Link | None:
    if not found:
        return None
    return Link(median(one.bandwidth for one in found), median(one.latency for one in found))
