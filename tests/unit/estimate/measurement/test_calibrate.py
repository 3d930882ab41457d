"""A hardware file that was measured can be read, and says what was measured."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from plait.app.cli.plan_output import calibration_text
from plait.errors import ConfigError
from plait.estimate.measurement import calibrate as module
from plait.estimate.measurement.calibrate import RankMeasurement, calibrate, hardware_of, knows_links
from plait.estimate.measurement.machine_rates import DeviceRates, LinkRates
from plait.estimate.measurement.measured_model_steps import (
    LARGE,
    MIDDLE,
    PLAN,
    SMALL,
    StepSeconds,
    predicted_seconds,
)
from plait.estimate.time.hardware import Efficiency, Hardware, Link, hardware_text, load_hardware
from plait.estimate.time.operation_times import Product, product_efficiency
from plait.ranks.launch.rank_pool import RankPool

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


def _three_ranks() -> list[RankMeasurement]:
    """Return figures of three ranks, whose medians are those of `GPU`, each rank's another one for some."""
    less = {name: getattr(RATES, name) / 2 for name in FIGURES}
    products = {name: rate / 2 for name, rate in RATES.products.items()}
    slow = replace(GPU, rates=replace(RATES, **less, products=products), memory=79 << 30)
    links = {"inside": LinkRates(4e-6, 3e11, 7e-6, 0.9), "across": LinkRates(9e-6, 3e10, 3e-6, 0.45)}
    return [GPU, slow, replace(GPU, **links)]  # type: ignore[arg-type]


FIGURES = [
    "half_depth",
    "attention",
    "attention_backward",
    "memory_bandwidth",
    "optimizer",
    "elementwise",
    "activation",
    "kernel",
]


def test_figures_are_the_medians_of_the_ranks_and_the_file_has_them(tmp_path: Path) -> None:
    found, file = hardware_of(_three_ranks()), tmp_path / "file.toml"
    used = product_efficiency(Product(4096, 4096, 4096), found)  # of the peak, at that size
    expected = Hardware(
        name="GPU",
        devices=8,
        memory=79 << 30,
        reserved=2.5 * 2**30,
        host_memory=1 << 40,
        waiting_speedup=1.0,
        multiprocessors=108,
        memory_bandwidth=1e11,
        peak={"fp32": 2e12 / used, "bf16": 8e12 / used},
        inside=Link(2e11, 3e-6),
        across=Link(2e10, 8e-6),
        oversubscription=1.0,
        overlaps=True,
        efficiency=Efficiency(
            product=1.0,
            half_depth=100.0,
            attention=4e12 / found.peak["bf16"],
            attention_backward=3e12 / found.peak["bf16"],
            memory=1.0,
            operands=1.0,
            elementwise=0.4,
            activation=0.3,
            optimizer=0.8,
            kernel=2e-6,
            host=5e-6,
            repetition=0.0,
            collective=1e-6,
            inside=1.0,
            across=1.0,
            all_to_all=0.5,
        ),
        fitted=found.fitted,
    )
    assert found == expected
    assert found.fitted.endswith(": measured by plait plan --calibrate on 3 ranks")
    file.write_text(hardware_text(found, links=knows_links([GPU])))
    assert _numbers(load_hardware(file)) == pytest.approx(_numbers(found), rel=1e-5)


def _numbers(hardware: Hardware) -> dict[str, float]:
    nested = asdict(hardware)
    parts = {name: value for name, value in nested.items() if isinstance(value, dict)}
    found = {f"{name}.{key}": value for name, part in parts.items() for key, value in part.items()}
    return found | {
        name: value for name, value in nested.items() if name not in parts and not isinstance(value, str)
    }


def test_rates_above_the_memorys_or_the_products_count_as_theirs() -> None:
    fast = replace(
        RATES, optimizer=2e11, elementwise=2e11, activation=2e11, attention=9e13, attention_backward=9e13
    )
    found = hardware_of([replace(GPU, rates=fast, across=None)])
    part = found.efficiency
    assert {part.optimizer, part.elementwise, part.activation, part.attention, part.attention_backward} == {
        1.0
    }
    assert found.across == found.inside == Link(2e11, 3e-6)
    assert found.fitted.endswith("on one rank")
    away = hardware_of([replace(GPU, inside=None)])  # one rank on each host
    assert (away.inside, away.across) == (Link(1e12, 1e-7), Link(2e10, 8e-6))
    assert (away.efficiency.collective, away.efficiency.all_to_all) == (2e-6, 0.4)


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
    apart = [
        replace(steps, **{name: factor * getattr(steps, name) for name in vars(steps)}) for factor in (0.5, 2)
    ]
    others = [replace(cpu, steps=one) for one in (apart[0], steps, apart[1])]
    machine = hardware_of(others)  # the medians
    assert (machine.waiting_speedup, machine.reserved, machine.overlaps) == (
        pytest.approx(1.4, rel=0.01),
        0,
        False,
    )
    found = machine.efficiency
    assert found.kernel == pytest.approx(5e-5, rel=1e-3)
    assert found.operands == pytest.approx(0.125, rel=1e-3)
    assert found.repetition == pytest.approx(3e-4, rel=1e-3)
    assert found.collective == pytest.approx(7e-4, rel=1e-3)
    alone = hardware_of([replace(cpu, steps=replace(steps, divided=None, pipelined=None))])
    assert alone.efficiency == replace(found, collective=1e-6)  # that of the links
    assert alone.waiting_speedup == 1.0
    quick = replace(steps, recomputed=0.0, divided=0.0, pipelined=0.0)  # no figure is below what it can be
    least = hardware_of([replace(cpu, steps=quick)])
    assert (least.efficiency.repetition, least.efficiency.collective) == (0, 0)
    assert 1.99 < least.waiting_speedup <= 2
    assert hardware_of([replace(cpu, steps=replace(steps, pipelined=1e3))]).waiting_speedup == 1


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
        known = load_hardware(source)
        assert load_hardware(file).inside == found.inside == known.inside
        assert found.across == known.across
        names = ("collective", "inside", "across", "all_to_all")
        assert [getattr(found.efficiency, one) for one in names] == [
            getattr(known.efficiency, one) for one in names
        ]
        assert found.oversubscription == known.oversubscription


def test_calibrate_measures_on_all_ranks_and_writes_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default there is a rank for each core, and under a launcher its own."""
    started: list[tuple[Any, ...]] = []

    def launch(function: object, seconds: float, **options: Any) -> list[RankMeasurement]:
        started.append((seconds, options["ranks"], options["threads"]))
        return [GPU]

    monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr(module, "visible_accelerators", lambda: 0)
    found = calibrate(tmp_path / "this.toml", 3, seconds=0.25)
    assert _numbers(load_hardware(tmp_path / "this.toml")) == pytest.approx(_numbers(found), rel=1e-5)
    calibrate(tmp_path / "this.toml")
    monkeypatch.setattr(module, "visible_accelerators", lambda: 5)
    calibrate(tmp_path / "this.toml")
    monkeypatch.setattr(module, "find_world", object)
    calibrate(tmp_path / "this.toml", 3)
    assert started == [(0.25, 3, 1), (0.4, os.cpu_count(), 1), (0.4, 5, None), (0.4, None, None)]
    with pytest.raises(ConfigError, match=r"this\.toml cannot be written \(.+\): give another file"):
        calibrate(tmp_path / "nowhere" / "this.toml", 1)


def test_a_cpu_rank_has_its_part_of_the_hosts_memory(
    thread_ranks: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "measure_device", lambda timer: (timer.budget, timer.device.type))
    monkeypatch.setattr(module, "measure_links", lambda group, timer: group.size)
    monkeypatch.setattr(module, "measure_steps", lambda group, timer, divides: (group.size, divides))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for found in thread_ranks.run(module._measure, 0.125, ranks=2):
        here = found.devices
        assert found == RankMeasurement(
            "CPU",
            False,
            memory // here,
            memory,
            here,
            0,
            (0.125, "cpu"),
            (here, here == 2),
            here,
            2 // here,  # type: ignore[arg-type]
        )


@pytest.mark.full
def test_calibrate_measures_this_machine(tmp_path: Path) -> None:
    found = calibrate(tmp_path / "this.toml", 1, seconds=0.01)
    assert load_hardware(tmp_path / "this.toml").name == found.name
    assert found.efficiency.kernel > 0
