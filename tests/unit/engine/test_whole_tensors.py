"""Rank 0 reads, every rank gets the same bits; and nobody waits for a rank 0 that has failed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.engine.tensor_sources import LocalSource, RankZeroSource, locate_tensors
from plait.errors import ModelError

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


class Tensors(nn.Module):
    """Buffers of all kinds and awkward shapes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for dtype in DTYPES:
            value = torch.randint(2, (3, 2), generator=generator).to(dtype)
            self.register_buffer(str(dtype).replace(".", "_"), value)
        self.register_buffer("scalar", torch.randn((), generator=generator))
        self.register_buffer("empty", torch.randn(0, 3, generator=generator))
        self.register_buffer("turned", torch.randn(2, 5, generator=generator).t())


def sources(make: Any, given: Any = None, **sizes: int) -> tuple[plait.Mesh, LocalSource, RankZeroSource]:
    mesh = plait.Mesh(**sizes)
    own = LocalSource(locate_tensors([("layer", make(mesh.rank))]), 0, None if mesh.rank else given)
    return mesh, own, RankZeroSource(own, mesh.group("world"), mesh.device)


def read_all(sizes: dict[str, int]) -> dict[str, Tensor]:
    mesh, own, source = sources(Tensors, **sizes)
    read = {}
    for number, name in enumerate(own.locations):
        if number % mesh.world == mesh.rank:
            source.skip(name)  # as a rank that does not hold it
        else:
            read[name] = source.read(name).clone()
    return read


@pytest.mark.parametrize("sizes", [{"dp": 3}, {"pp": 2, "tp": 2}], ids=str)
def test_every_rank_reads_the_tensors_of_rank_0(thread_ranks: Any, sizes: dict[str, int]) -> None:
    expected = LocalSource(locate_tensors([("layer", Tensors(0))]), 0)
    ranks = thread_ranks.run(read_all, sizes, ranks=4 if "pp" in sizes else 3)
    for read in ranks:
        assert 0 < len(read) < len(expected.locations)
        for name, value in read.items():
            assert value.dtype == expected.read(name).dtype
            assert torch.equal(value, expected.read(name)), name
    assert set().union(*ranks) == expected.locations.keys()


def test_a_single_rank_reads_its_own_tensors() -> None:
    mesh, own, source = sources(Tensors)
    assert mesh.world == 1
    assert all(torch.equal(source.read(name), own.read(name)) for name in own.locations)


def linear_on_meta_elsewhere(rank: int) -> nn.Module:
    with torch.device("meta" if rank else "cpu"):
        return nn.Linear(2, 2)


def read_given() -> tuple[torch.dtype, list[list[float]]]:
    """In the dtype in which they were given, not in the model's."""
    weight = torch.tensor([[1.5, 2.0], [3.0, 4.0]], dtype=torch.float64)
    given = {"layer.weight": weight, "layer.bias": torch.zeros(2)}
    _, _, source = sources(linear_on_meta_elsewhere, given, dp=2)
    read = source.read("layer.weight")
    return read.dtype, read.tolist()


def test_ranks_read_values_given_to_rank_0(thread_ranks: Any) -> None:
    assert thread_ranks.run(read_given, ranks=2) == [(torch.float64, [[1.5, 2.0], [3.0, 4.0]])] * 2


class Broken:
    """A slice of a file that is gone."""

    def get_shape(self) -> list[int]:
        return [2, 2]

    def __getitem__(self, index: Any) -> Tensor:
        raise OSError("the disk is gone")


def hear_of_failure(given: dict[str, Any]) -> tuple[str, str]:
    mesh, _, source = sources(linear_on_meta_elsewhere, given, dp=3)
    with pytest.raises((ModelError, OSError)) as caught:
        source.read("layer.weight")
    assert mesh.rank == 0 or caught.type is ModelError
    return caught.type.__name__, str(caught.value)


def test_values_that_do_not_fit_are_told_on_all_ranks(thread_ranks: Any) -> None:
    first, *others = thread_ranks.run(hear_of_failure, {"layer.bias": torch.zeros(3)}, ranks=3)
    told = (
        "the given values do not fit the model (missing: layer.weight; unfit: layer.bias is [3] and not [2])"
        ": give a tensor of the right shape for each name in model.state_dict()."
    )
    assert first == ("ModelError", told)
    assert others == [("ModelError", f"rank 0 refuses: {told}")] * 2


def test_a_failure_of_rank_zero_is_told_on_all_ranks(thread_ranks: Any) -> None:
    given = {"layer.weight": Broken(), "layer.bias": torch.zeros(2)}
    first, *others = thread_ranks.run(hear_of_failure, given, ranks=3)
    assert first == ("OSError", "the disk is gone")
    told = "rank 0 cannot read layer.weight (OSError: the disk is gone): check its values."
    assert others == [("ModelError", told)] * 2
