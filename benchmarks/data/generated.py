"""Text, a tokenizer and corpora for the benchmark, the same each time."""

from __future__ import annotations

import json
import random
import sysconfig
from pathlib import Path

import numpy as np

from plait.app.data.corpus_manifest import CorpusIndex, ShardEntry, shard_paths, write_index

VOCAB = 8192
_WORDS = ("self", "name", "value", "return", "None", "path", "data", "args", "result", "import")


def make_text(path: Path, megabytes: int) -> None:
    """Write JSON lines: parts of Python's standard library, put together anew, with some words replaced."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(one for one in root.rglob("*.py") if "site-packages" not in one.parts)
    lines = "".join(one.read_text(errors="ignore") for one in files).splitlines(keepends=True)
    generator, written = random.Random(0), 0
    with path.open("w") as file:
        while written < megabytes * 1_000_000:
            starts = (generator.randrange(len(lines) - 100) for _ in range(3))
            text = "".join(line for at in starts for line in lines[at : at + generator.randint(5, 60)])
            text = text.replace(generator.choice(_WORDS), f"w{generator.randrange(10_000)}")
            written += file.write(json.dumps({"text": text}) + "\n")


def make_tokenizer(path: Path, text: Path) -> None:
    """Train a byte-level BPE of 8,192 tokens on the first 5,000 documents."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    with text.open() as file:
        documents = [json.loads(line)["text"] for line, _ in zip(file, range(5000), strict=False)]
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.save(str(path))


def make_corpus(folder: Path, documents: int, *, chats: bool, shards: int = 20) -> None:
    """Write a prepared corpus of small documents, of 5 to 60 tokens each."""
    folder.mkdir()
    generator, entries, each = np.random.default_rng(0), [], documents // shards
    for number in range(shards):
        ends = np.cumsum(generator.integers(5, 61, each))
        total, paths = int(ends[-1]), shard_paths(folder, number, chats)
        generator.integers(VOCAB, size=total, dtype=np.uint16).tofile(paths[0])
        ends.tofile(paths[1])
        if chats:
            generator.integers(2, size=total, dtype=np.uint8).tofile(paths[2])
        entries.append(ShardEntry(total, each, total // 2 if chats else 0))
    write_index(folder, CorpusIndex("tokenizer.json", VOCAB, "uint16", None, chats, tuple(entries)))
