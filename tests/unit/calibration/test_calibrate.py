"""A hardware file that was measured can be read, and says what was measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from plait.calibration.calibrate import RankMeasurement, calibrate, hardware_of, knows_links
from plait.calibration.device_rates import DeviceRates
from plait.calibration.hardware_text import hardware_text
from plait.calibration.link_rates import LinkRates
from plait.calibration.model_steps import LARGE, MIDDLE, PLAN, SMALL, StepSeconds, predicted_seconds
from plait.calibration.timer import Timer
from plait.cli.plan_output import calibration_text
from plait.errors import ConfigError
from plait.prediction.hardware import load_hardware

RATES = DeviceRates({"fp32": 2e12, "bf16": 8e12}, 4096, 100.0, 4e12, 3e12, 1e11, 8e10, 4e10, 3e10, 2e-6, 5e-6)
GPU = RankMeasurement(
    "GPU",
    True,
    80 << 30,
    1 << 40,
    8,
    108,
    RATES,
    None,
    LinkRates(3e-6, 2e11, 1e-6, 0.5),
    LinkRates(8e-6, 2e10, 2e-6, 0.4),
)


def test_figures_are_the_medians_of_the_ranks(tmp_path: Path) -> None:
    slow = replace(GPU, rates=replace(RATES, memory_bandwidth=5e10), memory=79 << 30)
    found = hardware_of([GPU, slow, GPU])
    assert (found.memory_bandwidth, found.memory, found.devices) == (1e11, 79 << 30, 8)
    assert (found.inside.latency, found.across.bandwidth) == (3e-6, 2e10)
    assert (found.efficiency.collective, found.efficiency.all_to_all) == (1e-6, 0.5)
    assert found.efficiency.attention == 4e12 / found.peak["bf16"]
    assert (found.efficiency.optimizer, found.efficiency.elementwise) == (0.8, 0.4)
    assert (found.efficiency.operands, found.efficiency.activation) == (1.0, 0.3)
    assert found.peak["bf16"] == pytest.approx(8e12, rel=0.3)  # less what tiles lose at that size
    (tmp_path / "file.toml").write_text(hardware_text(found))
    assert hardware_text(load_hardware(tmp_path / "file.toml")) == hardware_text(found)


def test_steps_of_models_give_fixed_costs_and_the_rate_of_products_bytes() -> None:
    rates = DeviceRates({"fp32": 6e10}, 1024, 30.0, 3e10, 3e10, 2e10, 2e10, 1e10, 5e9, 0.0, 0.0)
    cpu = replace(
        GPU,
        accelerated=False,
        rates=rates,
        multiprocessors=0,
        devices=2,
        steps=StepSeconds(1e-3, 1.0, 1.0, 1.0, None, None),
    )
    real = hardware_of([cpu])
    figures = replace(real.efficiency, kernel=5e-5, operands=0.125, repetition=3e-4, collective=7e-4)
    real = replace(real, efficiency=figures, waiting_speedup=1.4)
    seconds = [predicted_seconds(one, real) for one in (SMALL, MIDDLE, LARGE)]
    seconds += [
        predicted_seconds(MIDDLE, real, replace(PLAN, **one)) for one in ({"recompute": "full"}, {"tp": 2})
    ]
    seconds.append(predicted_seconds(LARGE, real, replace(PLAN, pp=2, schedule="gpipe")))
    steps = StepSeconds(*seconds)
    machine = hardware_of([replace(cpu, steps=steps)])
    assert machine.waiting_speedup == pytest.approx(1.4, rel=0.01)
    found = machine.efficiency
    assert found.kernel == pytest.approx(5e-5, rel=1e-3)
    assert found.operands == pytest.approx(0.125, rel=1e-3)
    assert found.repetition == pytest.approx(3e-4, rel=1e-3)
    assert found.collective == pytest.approx(7e-4, rel=1e-3)


def test_seconds_are_those_of_the_speed_at_which_the_timer_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a run takes 2, 3 and 8 seconds, the products take 1, 1 and 4: the median of 2, 3 and 2."""
    seconds = iter([9.0, 2.0, 1.0, 3.0, 1.0, 8.0, 4.0])
    monkeypatch.setattr(Timer, "once", lambda _, run: next(seconds))
    assert Timer(torch.device("cpu"), 0.0, unit=10.0)(lambda: None, times=3) == 20.0


@pytest.mark.parametrize(
    ("device", "accelerated", "source"),
    [("NVIDIA H200", True, "h200-sxm"), ("CPU", False, "cpu-two-cores"), ("GPU", True, None)],
)
def test_links_that_one_rank_cannot_measure_are_the_bundled_ones_or_none(
    tmp_path: Path, device: str, accelerated: bool, source: str | None
) -> None:
    alone = [replace(GPU, device=device, accelerated=accelerated, inside=None, across=None)]
    found, file = hardware_of(alone), tmp_path / "file.toml"
    file.write_text(hardware_text(found, links=knows_links(alone)))
    told = f"those of {source}" if source else "none"
    assert f"Links were not measured, with one rank: {told} are in the file." in calibration_text(found)
    if source is None:
        with pytest.raises(ConfigError, match="inside_gb"):
            load_hardware(file)
    else:
        assert load_hardware(file).inside == load_hardware(source).inside
        assert load_hardware(file).efficiency.all_to_all == load_hardware(source).efficiency.all_to_all


@pytest.mark.full
def test_this_machine_is_measured(tmp_path: Path) -> None:
    found = calibrate(tmp_path / "this.toml", 1, seconds=0.01)
    assert load_hardware(tmp_path / "this.toml").name == found.name
    assert found.efficiency.kernel > 0
    with pytest.raises(ConfigError, match="cannot be written"):
        calibrate(tmp_path / "nowhere" / "this.toml", 1, seconds=0.001)
