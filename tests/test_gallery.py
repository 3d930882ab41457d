"""Each example in examples/gallery trains on two ranks, as threads, and is equal to one rank."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

GALLERY = Path(__file__).parent.parent / "examples" / "gallery"
LOSSES = re.compile(r"^loss ([\d.]+) at first, ([\d.]+) after \d+ steps$", re.MULTILINE)
VERDICT = re.compile(r"^(?:\w+: )?((?:NOT )?EQUAL) to one rank", re.MULTILINE)


def printed_by(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what an example prints; the loss has to fall to less than 0.7 of the first."""
    runpy.run_path(str(GALLERY / f"{name}.py"))["main"](ranks_as="threads")
    printed = capsys.readouterr().out
    losses = LOSSES.search(printed)
    assert losses is not None, printed
    assert float(losses[2]) < 0.7 * float(losses[1]), printed
    return printed


@pytest.mark.parametrize(
    ("name", "claims"),
    [
        pytest.param(
            "vision_transformer",
            [r"(9\d|100)% of unseen images", r"holds 13,\d+ of 26,\d+ parameters"],
            marks=pytest.mark.full,
        ),
        pytest.param(
            "encoder_decoder",
            [r"(9\d|100)% of unseen digits", r"rank 1 has layers 3, 4, 5"],
            marks=pytest.mark.full,
        ),
        pytest.param(
            "recurrent_model",
            [r"(9\d|100)% of unseen bits", r"rank 0: 0F0 0F1 0I0 0W0 "],
            marks=pytest.mark.full,
        ),
        pytest.param(
            "packed_fine_tuning",
            ["8,192 of 28,832 parameters"],
            marks=[pytest.mark.transformers, pytest.mark.full],
        ),
        pytest.param(
            "preferences",
            ["17,920 of 77,472 parameters", r"of (9\d|100)% of unseen pairs"],
            marks=pytest.mark.full,
        ),
        pytest.param(
            "mixture_of_experts",
            [r"(9\d|100)% of unseen tokens", r"holds 49,968 of 77,616 parameters"],
            marks=pytest.mark.full,
        ),
        pytest.param(
            "float8_linears",
            [r"gathers 88,640 bytes on a rank, in bf16 170,816", r"14 linears in float8; not head\.output"],
            marks=pytest.mark.full,
        ),
        ("own_loss", [r"(9\d|100)% of unseen objects", r"micro-batches of rank 0: 0, "]),
    ],
)
def test_an_example_of_the_gallery_learns_and_equals_one_rank(
    name: str, claims: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    printed = printed_by(name, capsys)
    assert [claim for claim in claims if not re.search(claim, printed)] == [], printed
    assert VERDICT.findall(printed) == ["EQUAL"], printed


@pytest.mark.full
def test_a_diffusion_transformer_draws_what_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    printed = printed_by("diffusion_transformer", capsys)
    drawn = re.findall(r"drawn for \w+: mean brightness (\S+) on the left, (\S+) on the right", printed)
    (bright, dark), (dark_too, bright_too) = (map(float, halves) for halves in drawn)
    assert min(bright, bright_too) > max(dark, dark_too) + 0.5, printed
    assert VERDICT.findall(printed) == ["EQUAL"], printed


@pytest.mark.full  # `parity/test_split_backward.py` has another in the quick run
def test_verify_finds_a_mistaken_split_of_a_gallery_model(capsys: pytest.CaptureFixture[str]) -> None:
    printed = printed_by("own_split_backward", capsys)
    assert VERDICT.findall(printed) == ["EQUAL", "NOT EQUAL"], printed
    assert "Mistaken: NOT EQUAL to one rank: the weight gradient of 10.weight in 10" in printed


def test_every_example_is_tested_and_in_the_table() -> None:
    names = {path.stem for path in GALLERY.glob("*.py")}
    table = (GALLERY / "README.md").read_text()
    rows = {
        row[1]: int(row[2]) for row in re.finditer(r"^\| \[(\w+)\.py\].*\| (\d+) \|", table, re.MULTILINE)
    }
    assert rows == {name: len((GALLERY / f"{name}.py").read_text().splitlines()) for name in names}
    assert [name for name in names if f'"{name}"' not in Path(__file__).read_text()] == []
