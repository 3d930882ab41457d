"""The sample of a run: of conversations the answer alone, whether or not a token ends it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from parity.chats import WORDS, save_tokenizer
from plait.app.config.config import Config
from plait.app.data.tokenizer import open_tokenizer
from plait.app.train.run_data import encode_prompt
from plait.app.train.trainer import sample_text
from plait.engine import Engine

pytestmark = pytest.mark.transformers


class Continuing:
    """In place of an engine: continues a prompt by "bad", and keeps the tokens that end it."""

    mesh = SimpleNamespace(device=torch.device("cpu"))
    stop: tuple[int, ...] = ()

    def generate(self, prompt: Tensor, tokens: int, *, stop: tuple[int, ...], **options: Any) -> Tensor:
        self.stop = stop
        return torch.cat([prompt, torch.tensor([[WORDS.index(one) for one in "bad"]])], dim=1)


@pytest.mark.parametrize("ends", [True, False], ids=["end", "no end"])
def test_only_the_answer_to_a_question_is_shown(tmp_path: Path, ends: bool) -> None:
    save_tokenizer(tmp_path)
    if not ends:
        path = tmp_path / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token": None}))
    given = {"data": {"source": "chats.jsonl", "tokenizer": str(tmp_path)}, "train": {"sample": "abc"}}
    config, tokenizer, engine = Config.model_validate(given), open_tokenizer(str(tmp_path)), Continuing()
    prompt = encode_prompt(config, tokenizer, is_question=True)
    shown = sample_text(cast(Engine, engine), config, tokenizer, prompt)
    assert shown.replace(" ", "") == "abc\nbad"
    assert engine.stop == ((WORDS.index("<end>"),) if ends else ())
