"""Batches of any dataset: their order, random numbers, workers, and what is refused."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import plait
from plait.app.data.batches import rank_rows
from plait.errors import DataError
from plait.ranks.launch.rank_pool import RankPool


class Noisy(Dataset[Any]):
    """Samples that name themselves, with noise of all three generators."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = [float(torch.rand(())), random.random(), float(np.random.rand())]
        return torch.tensor([index, *noise], dtype=torch.float64), torch.tensor(index)


def joined(loader: plait.Loader, step: int, ranks: int) -> Tensor:
    parts = [loader.batch(step, rank_rows(rank, ranks, loader.size))[0] for rank in range(ranks)]
    return torch.cat(parts)


def test_ranks_share_the_batches_of_a_seed_and_an_epoch_has_each_sample_once() -> None:
    loader = plait.Loader(Noisy(), batch=4, seed=3)
    np.random.seed(5)
    state, of_numpy = (torch.get_rng_state(), random.getstate()), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    whole = [loader.batch(step, slice(None)) for step in range(11)]
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]
    assert np.random.get_state()[1].tolist() == of_numpy  # type: ignore[union-attr]
    word = int(np.random.SeedSequence((3, 4 * 7 + 1)).generate_state(1, np.uint64)[0])
    drawn = torch.rand((), generator=torch.Generator().manual_seed(word)), random.Random(word).random()
    expected = [loader.order(7)[1], *map(float, drawn), np.random.RandomState(word % 2**32).rand()]
    assert whole[7][0][1].tolist() == expected, "noise of the seed and the sample's number in the run"
    for step in (0, 7, 10):
        assert all(torch.equal(joined(loader, step, ranks), whole[step][0]) for ranks in (1, 2, 4))
        assert loader.order(step) == whole[step][1].tolist()
    samples = torch.cat([inputs for inputs, _ in whole])
    epochs = samples[:, 0].view(4, 11)
    assert all(sorted(epoch.tolist()) == list(range(11)) for epoch in epochs)
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 4
    assert len(samples[:, 1:].flatten().unique()) == 3 * 44, "noise that came twice"
    assert plait.Loader(Noisy(), batch=4, seed=4).order(0) != loader.order(0)
    assert plait.Loader(Noisy(), batch=4, shuffle=False).order(2) == [8, 9, 10, 0]
    assert loader.order(2, slice(1, 3)) == loader.order(2)[1:3]
    assert (loader.size, loader.rows, loader.describe()) == (
        4,
        11,
        {"samples": 11, "seed": 3, "shuffle": True},
    )
    assert [loader.steps(epochs) for epochs in (1, 2, 4, 0.5)] == [3, 6, 11, 2]
    assert torch.equal(torch.cat([loader.share(7, rank, 2)[0] for rank in range(2)]), whole[7][0])


def read(dataset: Dataset[Any], workers: int) -> list[Tensor]:
    """On a rank: batches of some steps, read ahead, again, and after a jump."""
    loader = plait.Loader(dataset, batch=4, workers=workers)
    found = [loader.batch(step, slice(0, 2))[0] for step in (0, 1, 2, 2, 9, 10)]
    found.append(loader.batch(11, slice(2, 4))[0])
    loader.close()
    return found


def test_loader_workers_give_every_rank_the_same_batch_as_no_workers(thread_ranks: RankPool) -> None:
    """Of ranks that are processes: `parity/test_data_order.py`."""
    expected = read(Noisy(), 0)
    for found in thread_ranks.run(read, Noisy(), 2, ranks=2):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


def test_a_loader_refuses_what_is_no_map_style_dataset_of_pairs() -> None:
    with pytest.raises(DataError, match=r"the dataset is a Stream without a length .*: give a map-style"):
        plait.Loader(Stream(), batch=1)
    with pytest.raises(DataError, match="a dataset of 0 samples: give at least one"):
        plait.Loader([], batch=1)
    usual: Any = {"dataset": Noisy(), "batch": 1}
    for name, wrong, told in (
        *((name, value, f"a loader's {name}") for name in ("batch", "ahead") for value in (0, 1.0)),
        *((name, value, f"a loader's {name}") for name in ("seed", "workers") for value in (-1, True)),
        ("shuffle", 1, "a loader's shuffle"),
        ("context", "threads", "a loader's context"),
        ("collate", 3, "a loader's collate is 3: give a function of a list of samples"),
    ):
        with pytest.raises(DataError, match=told):
            plait.Loader(**{**usual, name: wrong})
    plait.Loader(Noisy(), batch=1, seed=0, workers=0, ahead=1, context="spawn")
    with pytest.raises(DataError, match="collate returned a Tensor, not inputs and targets"):
        plait.Loader(torch.arange(3), batch=1).batch(0, slice(None))  # type: ignore[arg-type]
    with pytest.raises(DataError, match="collate returned a dict"):
        plait.Loader([{"a": 1}], batch=1).batch(0, slice(None))
    inputs, targets = plait.Loader(TensorDataset(*2 * [torch.arange(3)]), batch=2).batch(0, slice(None))
    assert inputs.equal(targets)
