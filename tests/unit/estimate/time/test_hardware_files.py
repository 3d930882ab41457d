from dataclasses import replace
from pathlib import Path

import pytest

from plait.errors import ConfigError
from plait.estimate.time.hardware import (
    GIB,
    Efficiency,
    Hardware,
    Link,
    _parsed,
    bundled_name,
    gpu_peaks,
    hardware_names,
    load_hardware,
)
from plait.files import toml_value

FOLDER = Path(__file__).parents[4] / "src" / "plait" / "estimate" / "time" / "hardware_files"


def test_bundled_files_are_complete_and_say_where_figures_come_from() -> None:
    for name in hardware_names():
        hardware = load_hardware(name)
        assert hardware.name == name
        assert hardware.peak_of("bf16") > (1e14 if hardware.overlaps else 1e11)
        assert hardware.reserved < hardware.memory < 200 * GIB
        sections = (FOLDER / f"{name}.toml").read_text().split("\n[")[1:]
        assert all("#" in section for section in sections)


def test_load_hardware_returns_a_given_hardware_unchanged() -> None:
    hardware = replace(load_hardware("h100-sxm"), name="mine")
    assert load_hardware(hardware) is hardware
    assert isinstance(hardware, Hardware)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("memory_bandwidth_gb = 3350", "", "lacks device.memory_bandwidth_gb"),
        ("memory_bandwidth_gb = 3350", 'memory_bandwidth_gb = "fast"', "device.memory_bandwidth_gb = 'fast'"),
        ("memory_bandwidth_gb = 3350", "memory_bandwidth_gb = true", "device.memory_bandwidth_gb = True"),
        ("multiprocessors = 132", "multiprocessors = 1.5", "multiprocessors = 1.5: give a whole number"),
        ("devices = 8", "devices = 1.5", "host.devices = 1.5: give a whole number"),
        ("overlaps = 1", "overlaps = 0.5", "links.overlaps = 0.5: give a whole number"),
        ("inside_gb = 450", "inside_gb = nan", "links.inside_gb = nan"),
        ("inside_gb = 450", "inside_gb = 450\nnvlink = 1", "unknown field links.nvlink"),
        ("bf16 = 989.4", "bf8 = 989.4", "unknown field peak_tflops.bf8"),
        ("[links]", "[link]", "lacks links"),
        ("[device]", "extra = 1\n[device]", "unknown field extra"),
        ('name = "h100-sxm"', "name = 3", "name = 3: give a text"),
        ('name = "h100-sxm"', 'name = "a\\nb"', "name = 'a\\nb': give a text"),
        ("[device]", "[device", "is not TOML"),
    ],
)
def test_errors_of_a_hardware_file_name_file_and_field(
    tmp_path: Path, before: str, after: str, message: str
) -> None:
    text = (FOLDER / "h100-sxm.toml").read_text()
    assert before in text
    file = tmp_path / "mine.toml"
    file.write_text(text.replace(before, after))
    with pytest.raises(ConfigError) as error:
        load_hardware(file)
    assert message in str(error.value)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)


FIELDS = {
    "device": "memory_gib reserved_gib memory_bandwidth_gb multiprocessors",
    "host": "devices memory_gib waiting_speedup",
    "links": "inside_gb inside_latency_us across_gb across_latency_us oversubscription overlaps",
    "efficiency": "product half_depth attention attention_backward memory operands elementwise activation"
    " optimizer kernel_us host_us repetition_us collective_us inside across all_to_all",
}
"""The numbers of each section; `peak_tflops` has one for each precision."""
LEAST_AND_MOST: dict[str, tuple[float, float]] = {
    **{"memory_gib": (0.001, 1e5), "reserved_gib": (0, 1e5), "memory_bandwidth_gb": (0.001, 1e7)},
    **{"multiprocessors": (0, 1e5), "devices": (1, 1e4), "half_depth": (0, 1e5), "overlaps": (0, 1)},
    **{"inside_gb": (1e-6, 1e6), "across_gb": (1e-6, 1e6), "bf16": (1e-6, 1e6), "fp64": (1e-6, 1e6)},
    **dict.fromkeys(("waiting_speedup", "oversubscription"), (1.0, 1000.0)),
}


def test_each_number_of_a_hardware_file_has_a_minimum_and_a_maximum() -> None:
    """Latencies and fixed costs may be 0; efficiencies are parts of a peak, from a thousandth of it."""
    bundled = toml_value((FOLDER / "h100-sxm.toml").read_text())
    fields = [(section, field) for section, names in FIELDS.items() for field in names.split()]
    for section, field in (*fields, ("peak_tflops", "bf16"), ("peak_tflops", "fp64")):
        least, most = LEAST_AND_MOST.get(field, (0, 1e6) if field.endswith("_us") else (0.001, 1))
        if (section, field) == ("host", "memory_gib"):
            most = 1e7
        for value in (least, most):
            _parsed({**bundled, section: {**bundled[section], field: value}}, "mine.toml")
        beyond = (least - 1, most + 1) if field in WHOLE else (least * (1 - 1e-6) - 1e-9, most * (1 + 1e-6))
        for value in (*beyond, float("nan"), float("inf")):
            with pytest.raises(
                ConfigError, match=rf"mine\.toml has {section}\.{field} = .*give a number from"
            ):
                _parsed({**bundled, section: {**bundled[section], field: value}}, "mine.toml")


WHOLE = ("multiprocessors", "devices", "overlaps")


def test_figures_of_a_hardware_file_are_converted_to_bytes_and_seconds() -> None:
    """Each number of the file is another one here, and so is each field that is made of it."""
    numbers: dict[str, dict[str, float]] = {
        section: {field: (place + 1) / 64 for place, field in enumerate(fields.split())}
        for section, fields in FIELDS.items()
    }
    numbers["device"] |= {"memory_gib": 96, "multiprocessors": 7}
    numbers["host"] = {"devices": 3, "memory_gib": 800, "waiting_speedup": 1.25}
    numbers["links"] |= {"oversubscription": 2.5, "overlaps": 0, "inside_gb": 5, "across_gb": 6}
    peaks = {"bf16": 2.0, "fp64": 1.0}
    found = _parsed({"name": "n", "fitted": "f", "peak_tflops": peaks, **numbers}, "mine.toml")
    part = numbers["efficiency"]
    assert found == Hardware(
        name="n",
        devices=3,
        memory=96 * 2**30,
        reserved=2 / 64 * 2**30,
        host_memory=800 * 2**30,
        waiting_speedup=1.25,
        multiprocessors=7,
        memory_bandwidth=3 / 64 * 1e9,
        peak={"bf16": 2e12, "fp64": 1e12},
        inside=Link(5e9, 2 / 64 * 1e-6),
        across=Link(6e9, 4 / 64 * 1e-6),
        oversubscription=2.5,
        overlaps=False,
        efficiency=Efficiency(*[part[one] * (1e-6 if one.endswith("_us") else 1) for one in part]),
        fitted="f",
    )


def test_an_empty_or_non_table_section_of_a_hardware_file_is_refused() -> None:
    for section, given, message in [
        ("peak_tflops", {}, "no figures in peak_tflops"),
        ("peak_tflops", 3, "no figures in peak_tflops"),
        ("host", 3, "host = 3: make it a section"),
    ]:
        bundled = toml_value((FOLDER / "h100-sxm.toml").read_text())
        with pytest.raises(ConfigError, match=message):
            _parsed({**bundled, section: given}, "mine.toml")


def test_an_unknown_hardware_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"hardware h300 cannot be read .*h100-sxm"):
        load_hardware("h300")


def test_a_precision_without_a_peak_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"a100-80 has no figure peak_tflops\.fp8"):
        load_hardware("a100-80").peak_of("fp8")


def test_a_gpu_is_known_by_its_name() -> None:
    known = {
        "NVIDIA A100-SXM4-40GB": "a100-40",
        "NVIDIA A100-SXM4-80GB": "a100-80",
        "NVIDIA H100 80GB HBM3": "h100-sxm",
        "NVIDIA H200": "h200-sxm",
        "NVIDIA B200": "b200-sxm",
        "NVIDIA H100 PCIe": None,
        "NVIDIA A100-PCIE-40GB": None,
    }
    assert {device: bundled_name(device) for device in known} == known
    assert [*hardware_names()] == sorted([*filter(None, known.values()), "cpu-two-cores"])


PEAKS = {
    "NVIDIA B200": (2250, 75, 1125),
    "NVIDIA H100 80GB HBM3": (989.4, 67, 494.7),
    "NVIDIA H100 PCIe": (756, 51, 378),
    "NVIDIA H100 NVL": (835, 60, 417.5),
    "NVIDIA GH200 480GB": (989.4, 67, 494.7),
    "NVIDIA H200": (989.4, 67, 494.7),
    "NVIDIA A100-SXM4-80GB": (312, 19.5, 156),
    "NVIDIA A100-PCIE-40GB": (312, 19.5, 156),
    "NVIDIA A10G": (125, 31.2, 62.5),
    "NVIDIA L40S": (362, 91.6, 183),
    "NVIDIA L40": (181, 90.5, 90.5),
    "NVIDIA L4": (121, 30.3, 60),
    "nvidia geforce rtx 4090": (165, 82.6, 82.6),
}
"""In 1e12 operations a second: of bf16, of fp32 as torch computes by default, and of fp32 in TF32."""


def test_the_peaks_of_gpus_are_those_of_the_data_sheets() -> None:
    for device, expected in PEAKS.items():
        found = gpu_peaks(device)
        assert [found[one] / 1e12 for one in ("bf16", "fp32", "tf32")] == pytest.approx(expected), device
        assert found["fp16"] == found["bf16"]
        file = bundled_name(device)
        assert file is None or found == load_hardware(file).peak
    assert gpu_peaks("something new") == {}
