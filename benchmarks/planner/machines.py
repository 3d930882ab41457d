"""The hardware of the published runs: bundled files, and what differs from them in a cluster."""

from __future__ import annotations

from dataclasses import replace

from plait.estimate.time.hardware import Hardware, load_hardware

FITTED = {
    "vtrain-host": {"host": 7.96e-05, "inside": 0.98},
    "jean-zay": {"across": 0.2},
    "h100-triton": {"attention": 0.205, "attention_backward": 0.164},
}
"""Efficiencies of single clusters, frozen as `fit.py` printed them; the others are in the bundled files."""

JEAN_ZAY_RESERVED = 11.5 * 2**30
"""Bytes of Jean Zay's processes that no tensor allocates at the peak, frozen as `fit.py` printed them."""


def clusters() -> dict[str, Hardware]:
    """Return the hardware of each cluster by name."""
    a100, h100 = load_hardware("a100-80"), load_hardware("h100-sxm")
    found = {
        "a100-80": a100,
        "a100-40": load_hardware("a100-40"),
        "h100-sxm": h100,
        "b200-sxm": load_hardware("b200-sxm"),
        # llm-foundry's attention of 2023, written in Triton, is slow on this device.
        "h100-triton": replace(h100, name="h100-triton"),
        # H100 of 96 GB: torchtitan's benchmark page.
        "h100-96": replace(h100, name="h100-96", memory=95.0 * 2**30, memory_bandwidth=2.4e12),
        # Jean Zay: four adapters of 100 Gb/s for eight devices.
        "jean-zay": replace(
            a100,
            name="jean-zay",
            reserved=JEAN_ZAY_RESERVED,
            across=replace(a100.across, bandwidth=6.25e9),
        ),
        # vTrain's configuration: 800 Gb/s a host.
        "vtrain": replace(
            a100, name="vtrain", across=replace(a100.across, bandwidth=a100.across.bandwidth / 2)
        ),
        # vTrain's single hosts are slow at starting operations.
        "vtrain-host": replace(a100, name="vtrain-host"),
    }
    for name, figures in FITTED.items():
        found[name] = replace(found[name], efficiency=replace(found[name].efficiency, **figures))
    return found
