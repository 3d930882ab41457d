import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from plait.app.config.config import Config
from plait.app.data.batches import ValidationBatches, row_total
from plait.app.data.corpus_manifest import CorpusIndex, ShardEntry, shard_paths, write_index
from plait.app.data.recorded_tokenizer import record_tokenizer, tokenizer_mismatch
from plait.app.data.tokenizer import open_tokenizer
from plait.app.train.run_data import check_data, encode_prompt, load_data
from plait.errors import ConfigError, DataError, PlaitError

ALL = slice(None)


def make(source: object, *, train: dict[str, Any] | None = None, **fields: Any) -> Config:
    model = {"context": fields.pop("context", 8), "vocab": fields.pop("vocab", None)}
    data = {"source": str(source), **fields}
    return Config.model_validate({"model": model, "data": data, "train": train or {}})


def test_the_source_stdlib_in_bytes_has_256_classes_and_a_validation_part() -> None:
    data = load_data(make("stdlib", context=64))
    inputs, targets = data.training.batch(0, slice(4))
    assert inputs.shape == targets.shape == (4, 64)
    assert data.vocab == 256
    assert not data.unreadable
    assert data.summary.startswith("Python's standard library, ")
    assert data.summary.endswith("tokens (bytes), 5.0% of them for validation")


def test_validation_is_the_end_of_the_corpus(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("a" * 900 + "b" * 100)
    data = load_data(make(path, validation=0.1, train={"batch": 4}))
    (held_out,) = data.validations
    assert {int(token) for token in held_out.batches.batch(0, ALL)[0].flatten()} == {ord("b")}
    steps = range(900 // 8 // 4 + 1)
    assert {int(t) for step in steps for t in data.training.batch(step, ALL)[1].flatten()} == {ord("a")}


@pytest.mark.parametrize("batch", [4, 16])
def test_validation_has_each_sequence_once_in_batches_of_any_size(tmp_path: Path, batch: int) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(1 + number % 120 for number in range(1000)))

    def starts(limit: int | None) -> list[int]:
        data = load_data(make(path, validation=0.086, train={"batch": batch, "validate_batches": limit}))
        (held_out,) = data.validations
        assert isinstance(held_out.batches, ValidationBatches)
        whole = limit is None
        told = "all 10 sequences, without 5 tokens that fill none"
        assert held_out.summary == (
            told
            if whole
            else f"{batch * 2} of 10 sequences, evenly spaced (train.validate_batches = 2)"
            if batch == 4
            else told
        )
        numbers = range(-(-held_out.batches.rows // batch))
        batches = [held_out.batches.batch(number, ALL)[0] for number in numbers]
        return [int(row[0]) for each in batches for row in each]

    first = 1 + (1000 - 86) % 120
    every = [1 + (first - 1 + 8 * number) % 120 for number in range(10)]
    assert starts(None) == every
    assert starts(2) == ([every[number * 10 // 8] for number in range(8)] if batch == 4 else every)


def test_epochs_of_each_source_of_a_mixture_are_known(tmp_path: Path) -> None:
    for name, size in (("long", 8 * 64 + 1), ("short", 8 * 3 + 1)):
        (tmp_path / name).write_text("a" * size)
    mixture = (f"{tmp_path}/long=1", f"{tmp_path}/short=3")
    data = load_data(make("stdlib", mixture=mixture, validation=0.0, train={"batch": 16}))
    assert data.epochs(8) == {f" of {tmp_path}/long": 32 / 64, f" of {tmp_path}/short": 96 / 3}
    assert row_total(data.training) == 4, "then those of the short one come again"


def test_with_validation_0_there_are_no_validation_data(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a" * 100)
    assert not load_data(make(tmp_path / "text.txt", validation=0)).validations
    assert not load_data(make("random", validation=0)).validations


def test_the_source_random_needs_no_corpus() -> None:
    config = make("random", vocab=8192, context=256)
    check_data(config)
    data = load_data(config)
    assert data.vocab == 8192
    assert data.unreadable
    (held_out,) = data.validations
    assert not torch.equal(data.training.batch(0, ALL)[0], held_out.batches.batch(0, ALL)[0])
    assert torch.equal(data.training.batch(3, ALL)[0], load_data(config).training.batch(3, ALL)[0])


def test_a_token_array_with_tokens_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    data = load_data(make(tmp_path / "tokens.bin", vocab=1000))
    assert int(data.training.batch(0, ALL)[1].max()) > 255
    assert data.unreadable  # these are no bytes
    with pytest.raises(
        DataError, match=r"holds token 256 at position 256, .*set model\.vocab to at least 257"
    ):
        check_data(make(tmp_path / "tokens.bin"))


def test_the_vocabulary_of_a_tokenizer_file_may_be_padded(tmp_path: Path, word_tokenizer: Path) -> None:
    (tmp_path / "text.txt").write_text("a b c " * 100)
    config = make(tmp_path / "text.txt", tokenizer=str(word_tokenizer))
    check_data(config)
    assert load_data(config).vocab == 4
    assert load_data(make(tmp_path / "text.txt", tokenizer=config.data.tokenizer, vocab=128)).vocab == 128


REFUSED: dict[str, tuple[str, dict[str, Any], type[PlaitError], str]] = {
    "too short": (
        "a" * 9,
        {"validation": 0, "context": 9},
        DataError,
        "9 tokens for training, fewer than the 10",
    ),
    "short validation": (
        "a" * 100,
        {"validation": 0.05},
        DataError,
        r"data\.validation = 0\.05 leaves 5 tokens .* fewer than the 9 of one sequence",
    ),
    "beyond the vocabulary": (
        "a" * 50 + "z" * 50,
        {"vocab": 100, "validation": 0.1},
        DataError,
        "token 122 at pos",
    ),
    "empty": ("", {}, DataError, "is empty"),
    "binary": ("a\0b", {}, DataError, "is binary"),
    "prompt": (
        "!" * 200,
        {"vocab": 50, "train": {"sample": "def"}},
        ConfigError,
        "train.sample = 'def' holds token",
    ),
}


def test_unusable_data_are_refused_before_the_ranks_start(tmp_path: Path) -> None:
    for case in REFUSED:
        text, fields, kind, match = REFUSED[case]
        path = tmp_path / "text.txt"
        path.write_text(text)
        with pytest.raises(kind, match=match):
            check_data(make(path, **fields))


def conversations_on_disk(folder: Path, firsts: list[int]) -> Path:
    """Conversations of ten tokens each, of which those from `firsts` on are an answer, of 0 none."""
    folder.mkdir(parents=True)
    paths, count = shard_paths(folder, 0, True), len(firsts)
    answers = [first > 0 and place >= first for first in firsts for place in range(10)]
    np.arange(10 * count, dtype=np.uint16).tofile(paths[0])
    np.arange(10, 10 * count + 1, 10).tofile(paths[1])
    np.array(answers, np.uint8).tofile(paths[2])
    np.array(firsts, np.uint32).tofile(paths[3])
    entry = ShardEntry(10 * count, count, sum(answers), firsts.count(0), largest=10 * count - 1)
    write_index(folder, CorpusIndex("bytes", 256, "uint16", None, True, (entry,)))
    return folder


def test_each_row_of_conversations_has_a_target(tmp_path: Path) -> None:
    """Those whose answers are all cut away, or that have none, are left out, and are counted."""
    source = conversations_on_disk(tmp_path / "corpus", [3, 9, 0, 7, 8, 1] * 3)
    data = load_data(make(source, context=8, train={"batch": 4}))
    assert "9 without an answer in their first 8 tokens are left out" in data.summary
    assert row_total(data.training) == 8, "the last conversation is for validation"
    for step in range(6):
        assert (data.training.batch(step, ALL)[1] != -100).any(dim=1).all()


def test_conversations_that_cannot_be_learnt_are_refused(tmp_path: Path) -> None:
    outside = r"/corpus.*token 29, outside the vocabulary of 29: set model\.vocab to at least 30"
    cases: list[tuple[list[int], dict[str, Any], str]] = [
        ([9, 0, 9], {"validation": 0}, "has no conversation with an answer in its first 8 tokens"),
        ([9, 9, 1], {}, "has no conversation for training with an answer in its first 8 tokens"),
        ([1, 1, 9], {}, r"for validation .*raise data\.validation = 0\.05 or"),
        ([1], {}, r"has 1 conversations, of which data\.validation = 0\.05 leaves none for training"),
        ([1, 1, 1], {"vocab": 29}, outside),
    ]
    for number, (firsts, fields, message) in enumerate(cases):
        source = conversations_on_disk(tmp_path / str(number) / "corpus", firsts)
        with pytest.raises(DataError, match=message):
            check_data(make(source, context=8, **fields))


def test_another_chat_template_than_that_of_the_corpus_is_refused(
    tmp_path: Path, word_tokenizer: Path
) -> None:
    folder = conversations_on_disk(tmp_path / "corpus", [1])
    record_tokenizer(folder, str(word_tokenizer))
    index = CorpusIndex("tokenizer.json", 4, "uint16", None, True, ())
    tokenizer = open_tokenizer(str(word_tokenizer))
    assert tokenizer_mismatch(folder, index, tokenizer) == ""
    (word_tokenizer.parent / "chat_template.jinja").write_text("x")
    assert tokenizer_mismatch(folder, index, tokenizer).endswith("which has another chat template")


def test_a_text_begins_and_ends_as_its_tokenizer_says(tmp_path: Path, word_tokenizer: Path) -> None:
    """Where it is tokenized for the run, each file; a prompt only begins so."""
    for name in ("1", "2"):
        (tmp_path / f"{name}.txt").write_text("b c " * 20)
    written = json.loads(word_tokenizer.read_text())
    written["post_processor"] = {"type": "BertProcessing", "cls": ["[UNK]", 0], "sep": ["a", 1]}
    word_tokenizer.write_text(json.dumps(written))
    (word_tokenizer.parent / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "a"}'
    )
    config = make(tmp_path / "?.txt", tokenizer=str(word_tokenizer), validation=0, train={"sample": "b c"})
    data = load_data(config)
    assert (data.summary.count("84 tokens"), data.training.describe()["rows"]) == (1, 10)  # type: ignore[attr-defined]
    assert data.tokenizer.encode([b"b", b"c"]).tolist() == [0, 2, 1, 0, 3, 1]
    assert encode_prompt(config, data.tokenizer, is_question=False).tokens == [0, 2, 3]


def test_a_corpus_of_exactly_one_sequence_for_each_part_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("a" * 18)
    config = make(path, validation=0.5)
    check_data(config)
    data = load_data(config)
    assert data.training.batch(5, slice(2))[0].shape == (2, 8)
    (held_out,) = data.validations
    assert held_out.batches.batch(0, slice(2))[0].shape == (1, 8)
    assert held_out.summary == "the only sequence"


def test_checking_data_does_not_import_torch() -> None:
    program = (
        "import sys; from plait.app.config.config import Config; "
        "from plait.app.train.run_data import check_data; "
        "check_data(Config()); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
