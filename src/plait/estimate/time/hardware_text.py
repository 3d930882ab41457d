"""`hardware_text`: a hardware description as TOML, as `load_hardware` reads it."""

from __future__ import annotations

from plait.estimate.time.hardware import GB, GIB, MICRO, TERA, Hardware


def hardware_text(hardware: Hardware, *, links: bool = True) -> str:
    """Return a measured `hardware` as the text of a TOML file, with a comment on what was not measured.

    `links`: whether their figures are known; else the file lacks them, and who reads it is told so.
    """
    part = hardware.efficiency
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
product = {part.product:.6g}
half_depth = {part.half_depth:.6g}
attention = {part.attention:.6g}
attention_backward = {part.attention_backward:.6g}
memory = {part.memory:.6g}
operands = {part.operands:.6g}
elementwise = {part.elementwise:.6g}
activation = {part.activation:.6g}
optimizer = {part.optimizer:.6g}
kernel_us = {part.kernel / MICRO:.6g}
host_us = {part.host / MICRO:.6g}
repetition_us = {part.repetition / MICRO:.6g}
collective_us = {part.collective / MICRO:.6g}
inside = {part.inside:.6g}
across = {part.across:.6g}
all_to_all = {part.all_to_all:.6g}
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
