"""Hardware on which every kernel takes a second, and a transfer five and one for each of its steps."""

from dataclasses import replace

from plait.estimate.time.hardware import Link, load_hardware
from plait.plan.decoder_sizes import Decoder

H100, FAST = load_hardware("h100-sxm"), Link(bandwidth=1e300, latency=1.0)
FIXED = {"kernel": 1.0, "host": 0.0, "repetition": 100.0, "collective": 5.0}
HARDWARE = replace(
    H100,
    devices=64,
    memory_bandwidth=1e300,
    peak={"bf16": 1e300},
    inside=FAST,
    across=FAST,
    efficiency=replace(H100.efficiency, **FIXED),
)
DECODER = Decoder(layers=1, hidden=96, heads=6, vocab=510, context=64, gated=True, rotary=True)
