"""The context of a model in a folder, where it is not given: chosen from the data, and said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from parity import huggingface_cases as cases
from parity.chats import WORDS, conversations, save_tokenizer
from plait.app.config.config_parser import config_from_arguments, given_values
from plait.app.train.data_sources import with_context_of_data
from plait.app.train.predicted_run import predict_memory
from plait.app.train.run_data import load_data
from plait.app.train.trainer import build_model
from plait.models.layers.layer_sequence import layer_costs, sequence_of

pytestmark = pytest.mark.transformers
MOST = 40_960


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Llama that takes long sequences, its tokenizer, and conversations, the longest of 38 tokens."""
    made = tmp_path / "llama"
    cases.drawn(lambda: cases.llama(vocab_size=len(WORDS), max_position_embeddings=MOST)).save_pretrained(
        made
    )
    save_tokenizer(made)
    lines = (json.dumps({"messages": one}) for one in conversations(20))
    (tmp_path / "chats.jsonl").write_text("\n".join(lines) + "\n")
    return made


def arguments(folder: Path, *more: str, source: str = "chats.jsonl") -> list[str]:
    data = source if source == "random" else str(folder.parent / source)
    run = ["--run.dir", str(folder.parent / "run"), "--train.batch", "4"]
    return ["--model.name", str(folder), "--data.source", data, *run, *more]


def test_the_default_context_is_the_longest_conversation_rounded_up(folder: Path) -> None:
    given = arguments(folder)
    config, said = with_context_of_data(config_from_arguments(given), given)
    assert config.model.context == 64
    assert said == (
        "Context: 64 tokens a sequence for conversations of up to 38, of the 40,960 that the model takes; "
        "set model.context for another."
    )
    inputs, _ = load_data(config).training.batch(0, slice(0, 4))
    assert inputs["tokens"].shape == (4, 64)
    assert len(inputs["document_ids"].unique()) > 4


def test_the_default_context_of_other_data_is_1024_tokens(folder: Path) -> None:
    given = arguments(folder, source="random")
    config, said = with_context_of_data(config_from_arguments(given), given)
    assert config.model.context == 1024
    assert said.startswith("Context: 1,024 tokens a sequence, of the 40,960 that the model takes;")
    assert config == config_from_arguments(given)


def test_a_given_context_is_not_changed_by_the_data(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[model]\ncontext = 20\n")
    for more in (("--model.context", "20"), ("--config", str(file))):
        given = arguments(folder, *more)
        assert "model.context" in given_values(given)
        assert with_context_of_data(config_from_arguments(given), given) == (config_from_arguments(given), "")
    own = ["--data.source", "random"]
    assert with_context_of_data(config_from_arguments(own), own) == (config_from_arguments(own), "")


def test_predicted_memory_and_stage_cuts_follow_the_chosen_context(folder: Path) -> None:
    peaks, shares = [], []
    for context in ("64", "256"):
        config = config_from_arguments(arguments(folder, "--model.context", context, source="random"))
        model = build_model(config.model, len(WORDS))
        peaks.append(predict_memory(config, model, config.plan(), torch.device("cpu")).most)
        costs = layer_costs(sequence_of(model).layers)
        shares.append(costs[1] / costs[2])  # attention beside the MLP
    assert peaks[1] > 2 * peaks[0]
    assert shares[1] > 2 * shares[0]
