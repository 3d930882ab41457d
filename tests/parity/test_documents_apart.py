"""What one packed document holds changes no bit of another's: outputs, losses, gradients, in any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parity import chats
from plait.app.config.config import Config
from plait.app.data.batches import NO_TARGET, rank_rows
from plait.app.train.run_data import load_data
from plait.app.train.trainer import Trainer
from plait.ranks.launch.rank_pool import RankPool
from plait.ranks.mesh import Mesh

pytestmark = pytest.mark.transformers

SIZES = {"layers": 1, "hidden": 16, "heads": 4, "vocab": len(chats.WORDS), "context": chats.CONTEXT}
PLANS: dict[str, dict[str, Any]] = {
    "one": {},
    "contexts": {"cp": 2, "tp": 2, "sequence_parallel": "regather"},
    "stages": {"pp": 2, "cp": 2, "schedule": "zb-h1", "context_layout": "striped"},
    "ulysses": {"cp": 4, "context_parallel": "ulysses", "recompute": "full"},
    "everything": {"pp": 2, "cp": 2, "tp": 2, "sequence_parallel": "keep", "strategy": "full"},
    "copies": {"dp": 2, "tp": 2, "recompute": "selective"},
}
QUICK = (("gpt2", "corpus", "stages"),)
ROWS = [
    pytest.param(*row, marks=[] if row in QUICK else pytest.mark.full)
    for row in (
        (model, kind, plan) for model in ("llama", "gpt2") for kind in ("chats", "corpus") for plan in PLANS
    )
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations, and documents of text, as `plait data prepare` writes them."""
    made: Path = tmp_path_factory.mktemp("documents")
    chats.save_tokenizer(made)
    said = chats.save_chats(made / "chats.jsonl", chats.conversations(20))
    (made / "lines.txt").write_text(chats.lines(40))
    chats.prepare(said, made / "chats", made)
    chats.prepare(made / "lines.txt", made / "corpus", made)
    return made


def every_other(ids: Tensor, first: int) -> Tensor:
    """Whether each position belongs to document `first`, `first` + 2, … of its row; padding is one, too."""
    numbers = (ids[:, 1:] != ids[:, :-1]).cumsum(1)
    return torch.nn.functional.pad(numbers, (1, 0)) % 2 == first


def observed(trainer: Trainer, inputs: dict[str, Tensor], targets: Tensor) -> dict[str, Tensor]:
    """The output, the loss, and all gradients of a batch."""
    engine = trainer.engine
    output, loss = engine.output(inputs), engine.forward_backward(inputs, targets)
    assert isinstance(output, Tensor)
    gradients = {name: one.clone() for name, one in engine.named_gradients()}
    trainer.optimizer.zero_grad()
    return {"output": output, "loss": loss, **gradients}


def before_and_after(config: Config) -> list[tuple[dict[str, Tensor], dict[str, Tensor], Tensor]]:
    """On a rank: what is observed before and after some documents change, from which nothing is learnt."""
    plan, data = config.plan(), load_data(config)
    mesh = Mesh(plan)
    trainer = Trainer(config, plan, mesh, data)
    rows = rank_rows(mesh.index("dp"), mesh.size("dp"), config.train.batch)
    inputs, targets = data.training.batch(0, rows)
    assert isinstance(inputs, dict)
    found = []
    for first in (0, 1):
        there = every_other(inputs["document_ids"], first)
        targets_of_others = targets.masked_fill(there, NO_TARGET)
        tokens = torch.where(there, 4 + (inputs["tokens"] + 1) % len(chats.LETTERS), inputs["tokens"])
        before = observed(trainer, inputs, targets_of_others)
        found.append((before, observed(trainer, {**inputs, "tokens": tokens}, targets_of_others), there))
    return found


@pytest.mark.parametrize(("model", "kind", "plan"), ROWS)
def test_a_document_changes_nothing_of_another(
    thread_ranks: RankPool, folder: Path, tmp_path: Path, model: str, kind: str, plan: str
) -> None:
    parallel = PLANS[plan]
    given = chats.sections(folder, folder / kind, tmp_path, parallel, microbatches=2 // parallel.get("dp", 1))
    given["model"] = {"name": model, **SIZES}
    config = Config.model_validate(given)
    for first, second in thread_ranks.run(before_and_after, config, ranks=config.plan().world):
        for before, after, there in (first, second):
            outputs = before.pop("output"), after.pop("output")
            assert torch.equal(outputs[0][~there], outputs[1][~there])
            assert (outputs[0][there] != outputs[1][there]).any(-1).all()
            assert all(torch.equal(one, after[name]) for name, one in before.items())
        assert not any(torch.equal(one, second[0][name]) for name, one in first[0].items())
