"""Runs that stop in one layout and go on in another compute what a run computes that never stopped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from parity.checkpoints import LAYOUTS, link, model, never_stopped, plan_of, tensors_of
from plait.checkpoint.manifest import read_manifest
from plait.checkpoint.rewriting import convert_for
from plait.engine.blueprint import build_blueprint
from plait.ranks.launch.rank_pool import RankPool

STEPS = 2
"""Between two stops."""
TOLERANCE = 1e-12
FACTORS: dict[str, Callable[[str], object]] = {
    "tp": lambda name: LAYOUTS[name].tp,
    "pp": lambda name: LAYOUTS[name].pp,
    "dp": lambda name: LAYOUTS[name].dp,
    "cp": lambda name: LAYOUTS[name].cp,
    "replicate": lambda name: LAYOUTS[name].replicate,
    "strategy": lambda name: LAYOUTS[name].strategy,
    "schedule": lambda name: LAYOUTS[name].schedule,
}
Pair = tuple[str, str]


def ordered_pairs_of_values() -> list[Pair]:
    """Pairs of layouts, few, in which every value of every factor is followed by every other, and itself."""

    def steps(pair: Pair) -> set[tuple[str, object, object]]:
        return {(name, value(pair[0]), value(pair[1])) for name, value in FACTORS.items()}

    everything = list(product(LAYOUTS, repeat=2))
    counts = Counter(step for pair in everything for step in steps(pair))
    left = set(counts)

    def gain(pair: Pair) -> Fraction:
        """What is left and in few pairs counts most; for each rank that goes on, but for what pairs share."""
        return sum((Fraction(1, counts[step]) for step in steps(pair) & left), Fraction()) / (
            2 + LAYOUTS[pair[1]].world
        )

    chosen = []
    while left:
        best = max(everything, key=gain)
        chosen.append(best)
        left -= steps(best)
    return chosen


FEW = ordered_pairs_of_values()


def all_pairs() -> Iterator[object]:
    for pair in product(LAYOUTS, repeat=2):
        marks = [] if pair in (*FEW[::8], ("zb-v", "zb-v")) else [pytest.mark.full]
        yield pytest.param(*pair, marks=marks, id=f"{pair[0]} to {pair[1]}")


class Stops:
    """Runs that stopped after STEPS steps, and the same where they went on."""

    def __init__(self, thread_ranks: RankPool, folder: Path) -> None:
        self._pool = thread_ranks
        self._folder = folder
        self.of, self.tensors = cache(self._of), cache(tensors_of)

    def run(
        self, name: str, source: Path | None, target: Path, first: int, *, saves_loaded: bool
    ) -> list[float]:
        source_text = None if source is None else str(source)
        steps = first, first + STEPS
        arguments = name, source_text, str(target), steps, saves_loaded
        return self._pool.run(link, *arguments, ranks=LAYOUTS[name].world)[0]

    def _of(self, name: str) -> tuple[Path, Path, list[float]]:
        """Where it stopped; where it was after as many steps more; and their losses."""
        stop, on = self._folder / name / "stop", self._folder / name / "on"
        run = self._pool.run(never_stopped, name, str(stop), str(on), STEPS, ranks=LAYOUTS[name].world)
        return stop, on, run[0]


def files_of(path: Path) -> dict[str, set[tuple[object, ...]]]:
    """Which boxes lie in which file."""
    manifest = read_manifest(path)
    return {
        file.name: {(box.tensor, box.offsets, box.sizes) for box in file.boxes} for file in manifest.files
    }


@pytest.fixture(scope="module")
def stops(thread_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Stops:
    return Stops(thread_ranks, tmp_path_factory.mktemp("stops"))


def check_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        assert torch.equal(tensor, other[name]), name


def kind_of(name: str) -> str:
    """Parameters, or one of the moments."""
    return name.partition(".")[0] if name.startswith("model.") else name.rpartition(".")[2]


def check_close(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    assert one.keys() == other.keys()
    largest: dict[str, float] = {}
    for name, tensor in other.items():
        largest[kind_of(name)] = max(largest.get(kind_of(name), 0.0), float(tensor.norm()))
    for name, tensor in one.items():
        # A gradient that is exactly zero, as that of a key's bias, has only noise, which its moments and its
        # parameter keep: it is measured by the largest tensor of the same kind.
        size = max(float(other[name].norm()), 1e-3 * largest[kind_of(name)])
        assert float((tensor - other[name]).norm()) <= tolerance * size, name


@pytest.mark.parametrize(("before", "after"), list(all_pairs()))
def test_a_checkpoint_of_any_layout_is_resumed_in_any_other(
    stops: Stops, tmp_path: Path, before: str, after: str
) -> None:
    stop, on, losses = stops.of(before)
    again = stops.run(after, stop, tmp_path / "end", STEPS, saves_loaded=True)
    check_same_bits(stops.tensors(stop), tensors_of(tmp_path / "end-loaded"))
    if before == after:
        check_same_bits(tensors_of(tmp_path / "end"), stops.tensors(on))
        assert again == losses
    else:
        check_close(tensors_of(tmp_path / "end"), stops.tensors(on))
        assert again == pytest.approx(losses, rel=TOLERANCE)


@pytest.mark.full
def test_a_run_resumed_through_all_layouts_ends_as_one_rank(
    stops: Stops, thread_ranks: RankPool, tmp_path: Path
) -> None:
    source = None
    for place, name in enumerate(LAYOUTS):
        target = tmp_path / str(place)
        stops.run(name, source, target, place * STEPS, saves_loaded=False)
        source = target
    steps = STEPS * len(LAYOUTS)
    thread_ranks.run(never_stopped, "one", str(tmp_path / "half"), str(tmp_path / "all"), steps // 2, ranks=1)
    check_close(tensors_of(target), tensors_of(tmp_path / "all"), 1e-10)  # of 34 steps


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.full] if number % 3 else [])
        for number, name in enumerate(LAYOUTS)
    ],
)
def test_converted_to_a_layout_it_lies_as_if_written_there(name: str, stops: Stops, tmp_path: Path) -> None:
    source = stops.of("all" if name == "one" else "one")[0]
    convert_for(source, tmp_path / "converted", build_blueprint(model(), plan_of(name)).shard_plan)
    assert files_of(tmp_path / "converted") == files_of(stops.of(name)[0])
    before, after = stops.tensors(source), tensors_of(tmp_path / "converted")
    assert before.keys() == after.keys()
    for tensor, value in before.items():
        assert value.dtype == after[tensor].dtype
        assert torch.equal(value, after[tensor]), tensor
