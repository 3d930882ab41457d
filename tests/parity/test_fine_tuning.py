"""Fine-tuning on conversations is a plain loop over a model of transformers, loss by loss."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from parity import chats
from plait.app.cli.main import main
from plait.app.config.config import Config
from plait.app.train.run_data import load_data
from plait.app.train.train_run import train
from plait.ranks.launch.rank_pool import RankPool

pytestmark = [pytest.mark.transformers, pytest.mark.filterwarnings("ignore")]

CHATS = chats.conversations(40)
STEPS = 8
LIMIT = 1e-6
PLANS: dict[str, dict[str, Any]] = {
    "pp-tp": {"pp": 2, "tp": 2, "schedule": "zb-h1"},
    "full": {"dp": 2, "strategy": "full"},
    "cp": {"cp": 2, "tp": 2, "sequence_parallel": "regather", "recompute": "full"},
    "everything": {"pp": 2, "dp": 2, "tp": 2, "strategy": "gradients", "sequence_parallel": "keep"},
}
QUICK = ("full",)
ROWS = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.full) for name in PLANS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of transformers with its tokenizer, and conversations, as they are and in tokens."""
    made: Path = tmp_path_factory.mktemp("llama")
    chats.save_llama(made)
    source = chats.save_chats(made / "chats.jsonl", CHATS)
    chats.prepare(source, made / "prepared", made)
    return made


def sections(folder: Path, source: Path, run: Path, name: str) -> dict[str, dict[str, Any]]:
    """The sections of the configuration of a run on a plan."""
    microbatches = 2 // PLANS[name].get("dp", 1)
    return chats.sections(folder, source, run, PLANS[name], steps=STEPS, microbatches=microbatches)


def configured(folder: Path, run: Path, name: str, **model: Any) -> Config:
    """Training on the conversations in tokens."""
    given = sections(folder, folder / "prepared", run, name)
    given["model"] |= model
    return Config.model_validate(given)


def documents(inputs: dict[str, Tensor]) -> Iterator[Tensor]:
    """The tokens of each document of a batch, without padding."""
    for tokens, ids in zip(inputs["tokens"], inputs["document_ids"], strict=True):
        for number in ids.unique():
            if number >= 0:
                yield tokens[ids == number]


def answer_losses(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, int]:
    """The sum of the losses at the tokens of answers, each conversation run alone; their number."""
    total, count = torch.zeros(()), 0
    answered = {tuple(tokens[: chats.CONTEXT]): answers for tokens, answers in map(chats.by_hand, CHATS)}
    for tokens in documents(inputs):
        answers = torch.tensor(answered[tuple(tokens.tolist())])[: len(tokens)]
        labels = tokens.masked_fill(~answers, -100)[1:]
        logits = model(input_ids=tokens[None]).logits[0, :-1]
        total = total + functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        count += int((labels >= 0).sum())
    return total, count


def plain_losses(model: Any, config: Config) -> list[float]:
    """The loss of each step of a loop without plait, but for the rows of a batch."""
    given, model = config.train, model.train()
    trained = [one for one in model.parameters() if one.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [one for one in trained if one.dim() > 1]},
        {"params": [one for one in trained if one.dim() == 1], "weight_decay": 0.0},
    ]
    decay = 0.1 if given.weight_decay is None else given.weight_decay
    optimizer = torch.optim.AdamW(groups, given.lr, (0.9, 0.95), 1e-8, decay)
    rates = SequentialLR(
        optimizer,
        [
            LinearLR(optimizer, 1 / given.warmup, total_iters=given.warmup - 1),
            CosineAnnealingLR(optimizer, given.steps - given.warmup, 0.1 * given.lr),
        ],
        [given.warmup - 1],
    )
    batches, losses = load_data(config).training, []
    for step in range(given.steps):
        inputs, _ = batches.batch(step, slice(None))
        total, count = answer_losses(model, inputs)
        optimizer.zero_grad()
        (total / count).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trained, given.clip)
        optimizer.step()
        rates.step()
        losses.append(float(total) / count)
    return losses


def plain_model(folder: Path) -> Any:
    """The model in a folder, as transformers reads it."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def require_losses(run: Path, expected: list[float]) -> None:
    """Compare what a run has written with the losses of the plain loop."""
    found = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(expected) == STEPS
    assert expected[-1] < expected[0]
    assert found == pytest.approx(expected, rel=LIMIT, abs=0)


@pytest.mark.parametrize("name", ROWS)
def test_fine_tuning_has_the_losses_of_a_plain_loop(
    thread_ranks: RankPool, folder: Path, tmp_path: Path, name: str
) -> None:
    config = configured(folder, tmp_path, name)
    thread_ranks.run(train, config, ranks=config.plan().world)
    require_losses(tmp_path, plain_losses(plain_model(folder), config))


@pytest.mark.full
@pytest.mark.parametrize("name", ["full", "everything"])
def test_fine_tuning_adapters_has_the_losses_of_peft(
    thread_ranks: RankPool, folder: Path, tmp_path: Path, name: str
) -> None:
    peft = pytest.importorskip("peft")
    settings = {"r": 3, "lora_alpha": 5, "target_modules": "all-linear", "init_lora_weights": False}
    model = peft.get_peft_model(plain_model(folder), peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    model.save_pretrained(tmp_path / "adapter")
    config = configured(folder, tmp_path, name, lora={"adapter": str(tmp_path / "adapter")})
    thread_ranks.run(train, config, ranks=config.plan().world)
    require_losses(tmp_path, plain_losses(model, config))


@pytest.mark.full
def test_train_and_verify_read_a_json_lines_file_of_conversations_unprepared(
    folder: Path, tmp_path: Path
) -> None:
    given = sections(folder, folder / "chats.jsonl", tmp_path, "pp-tp")
    options = {f"--{part}.{name}": one for part, fields in given.items() for name, one in fields.items()}
    texts = (one if isinstance(one, str) else json.dumps(one) for one in options.values())
    words = [word.replace("null", "none") for pair in zip(options, texts, strict=True) for word in pair]
    adapted = ["--model.lora.rank", "2", "--model.lora.dropout", "0.1", "--run.ranks_as", "threads"]
    assert main(["verify", *words, *adapted]) == 0
    assert main(["train", *words]) == 0
    require_losses(tmp_path, plain_losses(plain_model(folder), Config.model_validate(given)))
