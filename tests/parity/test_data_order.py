"""Any two layouts train on the same documents in the same order, also across a resume within an epoch."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import plait
from parity import chats
from parity.cases import gpt2
from plait.app.config.config import Config
from plait.app.data.batches import Batches
from plait.app.loop.checkpoint_callback import Checkpoints
from plait.app.train.run_checkpoints import run_checkpoints
from plait.app.train.run_data import load_data
from plait.app.train.trainer import Trainer
from plait.ranks.launch.rank_pool import RankPool
from plait.tensor.nested_values import tensors_of

pytestmark = pytest.mark.transformers

SIZES = {"name": "gpt2", "layers": 1, "hidden": 16, "heads": 4, "vocab": len(chats.WORDS)}
STEPS, SAVED = 4, 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "copies": {"dp": 4, "strategy": "optimizer"},
    "parts": {"dp": 2, "pp": 2, "strategy": "full"},
    "contexts": {"cp": 2, "tp": 2, "context_layout": "striped"},
    "everything": {"dp": 2, "pp": 2, "cp": 2, "schedule": "zb-h1"},
}
KINDS = ("corpus", "chats", "mixture")
QUICK = (("mixture", "parts"),)
ROWS = [
    pytest.param(kind, layout, marks=[] if (kind, layout) in QUICK else pytest.mark.full)
    for kind in KINDS
    for layout in LAYOUTS
]
Shares = tuple[int, dict[int, list[str]]]
"""A rank's index among those that share a batch, and a hash of each row of its own share, by step."""


class Noted:
    """Batches that keep a hash of each row that they give."""

    def __init__(self, batches: Batches) -> None:
        self._batches, self.size = batches, batches.size
        self.rows: dict[int, list[str]] = {}

    def batch(self, step: int, rows: slice) -> tuple[Any, Any]:
        given = self._batches.batch(step, rows)
        columns = [list(tensor) for tensor in tensors_of(given)]
        self.rows[step] = [_hash(each) for each in zip(*columns, strict=True)]
        return given


def _hash(tensors: tuple[Tensor, ...]) -> str:
    return sha256(b"".join(one.numpy().tobytes() for one in tensors)).hexdigest()


def in_order(shares: list[Shares], steps: range) -> list[list[str]]:
    """The rows of each global batch: the ranks' own shares, one after another."""
    found: list[list[str]] = []
    for step in steps:
        ordered = sorted((index, rows[step]) for index, rows in shares)
        each = [list(copies) for _, copies in groupby(ordered, key=lambda one: one[0])]
        assert all(copy == copies[0] for copies in each for copy in copies)
        found.append([row for copies in each for row in copies[0][1]])
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations, and documents of text, as `plait data prepare` writes them."""
    made: Path = tmp_path_factory.mktemp("documents")
    chats.save_tokenizer(made)
    said = chats.save_chats(made / "chats.jsonl", chats.conversations(50))
    (made / "lines.txt").write_text(chats.lines(30))
    chats.prepare(said, made / "chats", made)
    chats.prepare(made / "lines.txt", made / "corpus", made)
    return made


def configured(folder: Path, kind: str, layout: str, run: Path, resume: str = "no") -> Config:
    parallel = LAYOUTS[layout]
    microbatches = 1 if parallel.get("dp") == 4 else 2
    given = chats.sections(folder, folder / kind, run, parallel, steps=STEPS, microbatches=microbatches)
    given["model"] = {**SIZES, "context": chats.CONTEXT}
    given["run"] |= {"save_every": SAVED, "keep_last": 0, "resume": resume}
    if kind == "mixture":
        given["data"] |= {"source": "stdlib", "mixture": [f"{folder}/chats=2", f"{folder}/corpus=1"]}
    given["train"]["batch"] = 4
    return Config.model_validate(given)


def train(config: Config) -> Shares:
    """On a rank: what it trained on, as `plait train` goes through its steps."""
    plan, data = config.plan(), load_data(config)
    mesh, noted = plait.Mesh(plan), Noted(data.training)
    trainer = Trainer(config, plan, mesh, replace(data, training=noted))
    trainer.run([run_checkpoints(config)])
    return mesh.index("dp"), noted.rows


@pytest.mark.parametrize(("kind", "layout"), ROWS)
def test_every_layout_and_a_resumed_run_have_the_same_batches(
    thread_ranks: RankPool, folder: Path, tmp_path: Path, kind: str, layout: str
) -> None:
    def batches(layout: str, run: str, resume: str = "no") -> list[list[str]]:
        config = configured(folder, kind, layout, tmp_path / run, resume)
        shares = thread_ranks.run(train, config, ranks=config.plan().world)
        return in_order(shares, range(0 if resume == "no" else SAVED, STEPS))

    expected = batches("one", "first")
    assert all(len(rows) == 4 for rows in expected)
    before, after = (
        {row for step in steps for row in step} for steps in (expected[:SAVED], expected[SAVED:])
    )
    assert after - before, "no row is new after the resume: it is between two epochs"
    saved = str(tmp_path / "first" / "checkpoints" / f"step-{SAVED:08d}")
    assert batches(layout, "resumed", saved) == expected[SAVED:]
    assert batches(layout, "whole") == expected


PLANS = {
    "first": plait.Plan(pp=2, microbatches=2),
    "copies": plait.Plan(dp=2, strategy="full", microbatches=2),
    "contexts": plait.Plan(cp=2, tp=2, microbatches=2),
}


def fit(plan: plait.Plan, run: Path, resume: str) -> Shares:
    """On a rank: what `plait.fit` trained on, read by worker processes."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(len(chats.WORDS), (14, 9), generator=generator)
    loader = plait.Loader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch=4, seed=7, workers=2)
    mesh, noted = plait.Mesh(plan), Noted(loader)
    kept = Checkpoints(run, every=SAVED, keep_last=0, resume=resume)
    plait.fit(gpt2(layers=1, heads=4).build(), plan, noted, steps=STEPS, callbacks=[kept], mesh=mesh)
    loader.close()
    return mesh.index("dp"), noted.rows


@pytest.mark.full
def test_every_layout_and_a_resumed_run_have_the_same_batches_from_loader_workers(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    def batches(name: str, resume: str = "no") -> list[list[str]]:
        shares = rank_pool.run(
            fit, PLANS[name], tmp_path / (name + resume[-1]), resume, ranks=PLANS[name].world
        )
        return in_order(shares, range(0 if resume == "no" else SAVED, STEPS))

    expected = batches("first")
    assert len({row for step in expected[:4] for row in step}) == 14
    for name in ("copies", "contexts"):
        assert batches(name) == expected
        assert batches(name, str(tmp_path / "firsto" / f"step-{SAVED:08d}")) == expected[SAVED:]
