from dataclasses import replace
from pathlib import Path

import pytest

from plait.errors import ConfigError
from plait.prediction.hardware import GIB, Hardware, hardware_names, load_hardware

FOLDER = Path(__file__).parents[3] / "src" / "plait" / "prediction" / "hardware_files"


@pytest.mark.parametrize("name", hardware_names())
def test_bundled_files_are_complete_and_say_where_figures_come_from(name: str) -> None:
    hardware = load_hardware(name)
    assert hardware.name == name
    assert hardware.peak_of("bf16") > (1e14 if hardware.overlaps else 1e11)
    assert hardware.reserved < hardware.memory < 200 * GIB
    sections = (FOLDER / f"{name}.toml").read_text().split("\n[")[1:]
    assert all("#" in section for section in sections)


def test_a_hardware_is_taken_as_it_is() -> None:
    hardware = replace(load_hardware("h100-sxm"), name="mine")
    assert load_hardware(hardware) is hardware
    assert isinstance(hardware, Hardware)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("memory_bandwidth_gb = 3350", "", "lacks device.memory_bandwidth_gb"),
        ("memory_bandwidth_gb = 3350", 'memory_bandwidth_gb = "fast"', "device.memory_bandwidth_gb = 'fast'"),
        (
            "multiprocessors = 132",
            "multiprocessors = -1",
            "multiprocessors = -1: give a number from 0",
        ),
        (
            "multiprocessors = 132",
            "multiprocessors = 1.5",
            "device.multiprocessors = 1.5: give a whole number",
        ),
        ("inside_gb = 450", "inside_gb = nan", "links.inside_gb = nan"),
        ("inside_gb = 450", "inside_gb = 450\nnvlink = 1", "unknown field links.nvlink"),
        ("bf16 = 989.4", "bf8 = 989.4", "unknown field peak_tflops.bf8"),
        ("[links]", "[link]", "lacks links"),
        ('name = "h100-sxm"', "name = 3", "name = 3: give a text"),
        ("[device]", "[device", "is not TOML"),
    ],
)
def test_errors_name_the_file_and_the_field(tmp_path: Path, before: str, after: str, message: str) -> None:
    text = (FOLDER / "h100-sxm.toml").read_text()
    assert before in text
    file = tmp_path / "mine.toml"
    file.write_text(text.replace(before, after))
    with pytest.raises(ConfigError) as error:
        load_hardware(file)
    assert message in str(error.value)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unknown_name_lists_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"hardware h300 cannot be read .*h100-sxm"):
        load_hardware("h300")


def test_a_precision_without_a_peak_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"a100-80 has no figure peak_tflops\.fp8"):
        load_hardware("a100-80").peak_of("fp8")
