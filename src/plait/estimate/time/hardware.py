"""`Hardware`: a description of devices, hosts and links, read from and written as a TOML file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from math import inf
from pathlib import Path
from typing import Any

from plait.errors import ConfigError, listed
from plait.files import read_toml, toml_value
from plait.plan.argument_checks import require_instance

GIB, GB, TERA, MICRO = 1 << 30, 1e9, 1e12, 1e-6
FILES = "hardware_files"
"""Folder of the bundled files, beside this module."""
PEAKS = "gpu_peaks.toml"
"""Peak rates by the product names of GPUs, beside this module."""


@dataclass(frozen=True)
class Link:
    """A kind of link between devices, such as NVLink inside a host or a network across hosts."""

    bandwidth: float
    """Bytes a second that a device sends, while it receives as many."""
    latency: float
    """Seconds that a message takes besides its bytes: the α of a collective's steps."""


@dataclass(frozen=True)
class Efficiency:
    """The measured part of the peak rates that operations reach, and their fixed costs."""

    product: float
    """Largest fraction of the peak rate that a matrix product reaches."""
    half_depth: float
    """Length of the summed dimension at which a product reaches half of what a long one does."""
    attention: float
    """Largest fraction of the peak rate that a fused attention kernel reaches in its forward."""
    attention_backward: float
    """Largest fraction of the peak rate that its backward reaches."""
    memory: float
    """Fraction of the memory bandwidth that operations reach."""
    operands: float
    """Fraction of that at which matrix products read their operands and write their results."""
    elementwise: float
    """Fraction of what `memory` allows that norms and residuals reach, where arithmetic slows them."""
    activation: float
    """Fraction of the same which activations inside an MLP reach, such as GELU."""
    optimizer: float
    """Fraction of it which the optimizer's step reaches: below 1 where it is not one kernel."""
    kernel: float
    """Seconds that a device takes for an operation besides its arithmetic and its bytes."""
    host: float
    """Seconds that the host takes to start an operation."""
    repetition: float
    """Seconds that the repeated forward of a recomputed layer takes besides its operations."""
    collective: float
    """Seconds that a collective or a message takes besides its steps and its bytes."""
    inside: float
    """Fraction of the bandwidth inside a host that large collectives reach."""
    across: float
    """Fraction of the bandwidth across hosts that large collectives reach."""
    all_to_all: float
    """Fraction of either that large all-to-alls reach beside other collectives."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Description of devices, hosts and links, for predictions; sizes in bytes, times in seconds.

    `load_hardware` reads it from a file.
    """

    name: str
    devices: int
    """Devices of a host."""
    memory: float
    """Bytes of a device that a process can allocate."""
    reserved: float
    """Bytes of `memory` that the driver, communicators and fragmentation of the allocator take."""
    host_memory: float
    waiting_speedup: float
    """How many times as fast a rank computes while enough others wait: above 1 where ranks share cores."""
    multiprocessors: int
    """Units of a device that compute a tile of a product each; 0 on a CPU, whose rates depend on no tiles."""
    memory_bandwidth: float
    peak: Mapping[str, float]
    """Operations a second of dense matrix products, by the precision of their inputs; `fp32`: as torch
    computes by default, `tf32`: where it may round fp32 inputs to TF32."""
    inside: Link
    across: Link
    oversubscription: float
    """Factor by which the network between hosts is narrower than the sum of their links."""
    overlaps: bool
    """Whether transfers and memory accesses run beside computation; on a CPU the cores move the bytes."""
    efficiency: Efficiency
    fitted: str
    """On what the efficiencies were fitted, and when."""

    def peak_of(self, precision: str) -> float:
        """Return the peak FLOP/s of matrix products in `precision`. Raises ConfigError where unknown."""
        if precision not in self.peak:
            raise ConfigError(
                f"{self.name} has no figure peak_tflops.{precision}, the products' precision: add it to the "
                f"file, or choose one of {listed(sorted(self.peak))}."
            )
        return self.peak[precision]


_NUMBERS: Mapping[str, Mapping[str, tuple[float, float, float]]] = {
    "device": {
        "memory_gib": (GIB, 0.001, 1e5),
        "reserved_gib": (GIB, 0, 1e5),
        "memory_bandwidth_gb": (GB, 0.001, 1e7),
        "multiprocessors": (1, 0, 1e5),
    },
    "host": {
        "devices": (1, 1, 1e4),
        "memory_gib": (GIB, 0.001, 1e7),
        "waiting_speedup": (1, 1, 1000),
    },
    "links": {
        "inside_gb": (GB, 1e-6, 1e6),
        "inside_latency_us": (MICRO, 0, 1e6),
        "across_gb": (GB, 1e-6, 1e6),
        "across_latency_us": (MICRO, 0, 1e6),
        "oversubscription": (1, 1, 1000),
        "overlaps": (1, 0, 1),
    },
    "efficiency": {
        "product": (1, 0.001, 1),
        "half_depth": (1, 0, 1e5),
        "attention": (1, 0.001, 1),
        "attention_backward": (1, 0.001, 1),
        "memory": (1, 0.001, 1),
        "operands": (1, 0.001, 1),
        "elementwise": (1, 0.001, 1),
        "activation": (1, 0.001, 1),
        "optimizer": (1, 0.001, 1),
        "kernel_us": (MICRO, 0, 1e6),
        "host_us": (MICRO, 0, 1e6),
        "repetition_us": (MICRO, 0, 1e6),
        "collective_us": (MICRO, 0, 1e6),
        "inside": (1, 0.001, 1),
        "across": (1, 0.001, 1),
        "all_to_all": (1, 0.001, 1),
    },
}
"""Section and field of each number: its unit, and the range of the number in the file."""
_PEAK = "peak_tflops"
_PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")
_TEXTS = ("name", "fitted")
_DEVICES = (
    (("A100", "SXM", "40GB"), "a100-40"),
    (("A100", "SXM", "80GB"), "a100-80"),
    (("H100", "HBM3"), "h100-sxm"),
    (("H200",), "h200-sxm"),
    (("B200",), "b200-sxm"),
)
"""Parts of a GPU's product name, and its bundled file. H100 with another memory are cards for PCIe."""


def hardware_names() -> tuple[str, ...]:
    """Return the names of the bundled hardware files, such as `h100-sxm`, sorted."""
    folder = files(__package__) / FILES
    return tuple(sorted(file.name.removesuffix(".toml") for file in folder.iterdir()))


def bundled_name(device: str) -> str | None:
    """Return the name of the hardware file that plait ships for a GPU, such as "h100-sxm", or None.

    `device`: its product name, such as "NVIDIA H100 80GB HBM3".
    """
    return next((file for parts, file in _DEVICES if all(part in device for part in parts)), None)


def gpu_peaks(device: str) -> Mapping[str, float]:
    """Return the peak FLOP/s by precision of the GPU with this product name; empty where unknown."""
    for part, found in toml_value((files(__package__) / PEAKS).read_text()).items():
        if part.lower() in device.lower():
            if isinstance(found, str):
                return load_hardware(found).peak
            return {name: _peak(name, value, PEAKS) for name, value in found.items()}
    return {}


def load_hardware(given: Hardware | str | Path) -> Hardware:
    """Return the hardware of a bundled name such as `h100-sxm`, or of a TOML file; a `Hardware` as it is.

    Raises ConfigError for a file that cannot be read, and for a field that is unknown, missing or out of
    range; the message names file and field.
    """
    if isinstance(given, Hardware):
        return given
    require_instance("hardware", given, (str, Path), "give a name, a TOML file or a plait.Hardware")
    if str(given) in hardware_names():
        return _parsed(toml_value((files(__package__) / FILES / f"{given}.toml").read_text()), str(given))
    try:
        found = read_toml(Path(given))
    except OSError as error:
        raise ConfigError(
            f"hardware {given} cannot be read ({error.strerror}): give a TOML file, or one of "
            f"{listed(hardware_names())}."
        ) from None
    except ValueError as error:
        raise ConfigError(f"{given} is not TOML ({error}): mend it, or give one of the bundled.") from None
    return _parsed(found, str(given))


def _parsed(found: Mapping[str, Any], source: str) -> Hardware:
    for section in (*_NUMBERS, _PEAK, *_TEXTS):
        if section not in found:
            raise ConfigError(f"{source} lacks {section}: add it, as the bundled hardware files have it.")
    unknown = sorted(set(found) - {*_NUMBERS, _PEAK, *_TEXTS})
    if unknown:
        raise ConfigError(f"{source} has the unknown field {unknown[0]}: take it out.")
    for name in _TEXTS:
        if not isinstance(found[name], str) or not found[name].isprintable():
            raise ConfigError(f"{source} has {name} = {found[name]!r}: give a text of one line.")
    device, host, links, part = (_section(found, name, source) for name in _NUMBERS)
    peaks = found[_PEAK]
    if not isinstance(peaks, dict) or not peaks:
        raise ConfigError(f"{source} has no figures in {_PEAK}: give one for each precision, such as bf16.")
    return Hardware(
        name=found["name"],
        devices=int(host["devices"]),
        memory=device["memory_gib"],
        reserved=device["reserved_gib"],
        host_memory=host["memory_gib"],
        waiting_speedup=host["waiting_speedup"],
        multiprocessors=int(device["multiprocessors"]),
        memory_bandwidth=device["memory_bandwidth_gb"],
        peak={name: _peak(name, value, source) for name, value in peaks.items()},
        inside=Link(links["inside_gb"], links["inside_latency_us"]),
        across=Link(links["across_gb"], links["across_latency_us"]),
        oversubscription=links["oversubscription"],
        overlaps=bool(links["overlaps"]),
        efficiency=Efficiency(**{name.removesuffix("_us"): value for name, value in part.items()}),
        fitted=found["fitted"],
    )


def _peak(name: str, value: object, source: str) -> float:
    if name not in _PRECISIONS:
        raise ConfigError(f"{source} has the unknown field {_PEAK}.{name}: {listed(_PRECISIONS)} are known.")
    return _number(value, f"{_PEAK}.{name}", source, (TERA, 1e-6, 1e6))


def _section(found: Mapping[str, Any], section: str, source: str) -> dict[str, float]:
    given, fields = found[section], _NUMBERS[section]
    if not isinstance(given, dict):
        raise ConfigError(f"{source} has {section} = {given!r}: make it a section, [{section}].")
    unknown = sorted(set(given) - set(fields))
    if unknown:
        raise ConfigError(
            f"{source} has the unknown field {section}.{unknown[0]}: {listed(tuple(fields))} are known."
        )
    for name in fields:
        if name not in given:
            raise ConfigError(
                f"{source} lacks {section}.{name}: add it, as the bundled hardware files have it."
            )
    return {name: _number(given[name], f"{section}.{name}", source, fields[name]) for name in fields}


def _number(value: object, field: str, source: str, allowed: tuple[float, float, float]) -> float:
    unit, least, most = allowed
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not least <= value <= most or value == inf:  # type: ignore[operator]
        raise ConfigError(f"{source} has {field} = {value!r}: give a number from {least:g} to {most:g}.")
    if unit == 1 and field.endswith(("devices", "multiprocessors", "overlaps")) and value != int(value):  # type: ignore[call-overload]
        raise ConfigError(f"{source} has {field} = {value!r}: give a whole number.")
    return float(value) * unit  # type: ignore[arg-type]


def hardware_text(hardware: Hardware, *, links: bool = True) -> str:
    """Return a measured `hardware` as the text of a TOML file, with a comment on what was not measured.

    `links`: whether their figures are known; else the file lacks them, and who reads it is told so.
    """
    efficiency = "\n".join(
        f"{name} = {getattr(hardware.efficiency, name.removesuffix('_us')) / unit:.6g}"
        for name, (unit, *_) in _NUMBERS["efficiency"].items()
    )
    peaks = "\n".join(f"{name} = {rate / TERA:.6g}" for name, rate in hardware.peak.items())
    return f"""\
# Written by `plait plan --calibrate`. Rates are those of operations alone, so most efficiencies are 1.
name = "{hardware.name}"
fitted = "{hardware.fitted}"

[device]
memory_gib = {hardware.memory / GIB:.6g}
# Not measured: what driver, communicators and fragmentation take.
reserved_gib = {hardware.reserved / GIB:.6g}
memory_bandwidth_gb = {hardware.memory_bandwidth / GB:.6g}
multiprocessors = {hardware.multiprocessors}

[peak_tflops]
{peaks}

[host]
devices = {hardware.devices}
memory_gib = {hardware.host_memory / GIB:.6g}
# Above 1 where there were more ranks than cores.
waiting_speedup = {hardware.waiting_speedup:.6g}

[links]
{_link_lines(hardware) if links else _NO_LINKS}
oversubscription = {hardware.oversubscription:.6g}
# Not measured: 1 on GPUs, 0 on a CPU, whose cores move the bytes.
overlaps = {hardware.overlaps:d}

[efficiency]
{efficiency}
"""


_NO_LINKS = """\
# Not measured, with one rank, and not known for this device: give inside_gb, inside_latency_us, across_gb and
# across_latency_us, as the bundled files have them."""


def _link_lines(hardware: Hardware) -> str:
    return f"""\
inside_gb = {hardware.inside.bandwidth / GB:.6g}
inside_latency_us = {hardware.inside.latency / MICRO:.6g}
# As inside, where all ranks were on one host: give the network's figures.
across_gb = {hardware.across.bandwidth / GB:.6g}
across_latency_us = {hardware.across.latency / MICRO:.6g}"""
