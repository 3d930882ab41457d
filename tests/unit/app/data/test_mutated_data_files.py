"""Every reader of data files takes damaged and strange ones as they are, or refuses them in one sentence.

Where a kind of file has a checksum, what is read is what was written; else it is what another reader of the
same bytes says, or a value of the promised type.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from mutated_files import Kind, mutations, outcome, remove
from parity.chats import PLAIN, save_tokenizer
from plait.app.config.config_parser import config_from_arguments
from plait.app.data.chat_encoder import ChatEncoder, are_chats
from plait.app.data.corpus_manifest import CorpusIndex, require_intact
from plait.app.data.document_sources import divided, files_of, read_records, read_texts
from plait.app.data.preparation import prepare_corpus
from plait.app.data.token_arrays import open_tokens
from plait.app.data.token_shards import open_corpus
from plait.app.data.tokenizer import open_tokenizer
from plait.errors import PlaitError
from plait.estimate.time.hardware import load_hardware

TEXTS = [f"document {number} ä漢🙂 of some length\n" for number in range(40)]
CHATS = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "de"}]


class Reader(NamedTuple):
    """How a kind of file is made and read."""

    name: str
    """The file's, in its folder."""
    kind: Kind
    make: Callable[[Path], object]
    """Makes a folder with an intact file."""
    read: Callable[[Path], Any]
    """Reads the file at a path. Where `same`, returns what can be compared."""
    expected: Callable[[Path], Any] | None = None
    """What it has to be, by another reader of the same bytes; None: see `is_same`."""
    is_same: bool = False
    """Whether it has to be what the intact file has, since there is a checksum."""


def texts_in(path: Path) -> list[str]:
    files = files_of(str(path))
    assert not are_chats(files)
    found = [part for file in files for one in divided(file, 500) for part in read_texts(one, "text")]
    return (
        [part.text for part in found] if files[0].kind != "text" else ["".join(part.text for part in found)]
    )


def rows_in(path: Path) -> list[Any]:
    files = files_of(str(path))
    return [row for file in files for one in divided(file, 2000) for _, row in read_records(one, None)]


def corpus_in(path: Path) -> tuple[CorpusIndex, list[int]]:
    corpus, index = open_corpus(path.parent)
    require_intact(path.parent, index)
    return index, [*corpus.read(0, len(corpus)).tolist(), *corpus.document_ends(0, index.documents).tolist()]


def prepared_again(path: Path) -> tuple[CorpusIndex, list[int]]:
    source = str(path.parent.parent / "texts.jsonl")
    prepare_corpus([source], path.parent, "bytes", portion=1000)
    return corpus_in(path)


def tokens_in(path: Path) -> list[int]:
    corpus = open_tokens(str(path.with_suffix(".bin") if path.suffix == ".idx" else path), "uint16")
    return [*corpus.read(0, len(corpus)).tolist(), *corpus.document_ends(0, corpus.document_count).tolist()]


def tokenized(path: Path) -> list[int]:
    reader = open_tokenizer(str(path.parent))
    reader.unwritten_start()
    around = reader.surrounding(None)
    (tokens,) = reader.encode_each(["abc de"])
    return list(around.complete(tokens).tolist())


def chat_in(path: Path) -> list[int]:
    return list(ChatEncoder(str(path.parent)).encode({"messages": CHATS}).tokens.tolist())


def write_corpus(folder: Path) -> None:
    if not (folder.parent / "texts.jsonl").exists():  # its time counts
        write_jsonl(folder.parent)
    prepare_corpus([str(folder.parent / "texts.jsonl")], folder, "bytes", portion=1000)


def write_jsonl(folder: Path) -> None:
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": one, "n": 1}) + "\n" for one in TEXTS))


def write_list(folder: Path) -> None:
    (folder / "texts.json").write_text(json.dumps([{"text": one, "n": [1.5, None]} for one in TEXTS]))


def write_gzip(folder: Path) -> None:
    (folder / "texts.txt.gz").write_bytes(gzip.compress("".join(TEXTS).encode()))


def write_table(folder: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"text": one, "messages": CHATS, "n": None if len(one) % 2 else 1} for one in TEXTS]
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, folder / "rows.parquet", row_group_size=10)
    with pyarrow.ipc.new_stream(folder / "rows.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=10)


def write_tokens(folder: Path) -> None:
    tokens = np.arange(300, dtype=np.uint16)
    np.save(folder / "tokens.npy", tokens)
    tokens.tofile(folder / "plain.bin")
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, 300
    (folder / "header.bin").write_bytes(header.tobytes() + tokens.tobytes())
    tokens.tofile(folder / "megatron.bin")
    sizes, firsts = np.full(30, 10, np.int32), np.arange(0, 31, 3)
    counts = np.array([30, len(firsts)])
    start = b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + b"\x08" + counts.tobytes()
    (folder / "megatron.idx").write_bytes(start + sizes.tobytes() + np.zeros(30).tobytes() + firsts.tobytes())


def write_tokenizer(folder: Path) -> None:
    pytest.importorskip("transformers")
    save_tokenizer(folder, PLAIN)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("added_tokens_decoder", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    (folder / "special_tokens_map.json").write_text(
        '{"eos_token": {"content": "<end>"}, "pad_token": "<end>"}'
    )
    (folder / "chat_template.jinja").write_text(PLAIN)


def write_configurations(folder: Path) -> None:
    from importlib.resources import files

    from plait.estimate.time.hardware import FILES

    bundled = files("plait.estimate.time").joinpath(FILES)
    first = min((one for one in bundled.iterdir() if one.name.endswith(".toml")), key=lambda one: one.name)
    (folder / "hardware.toml").write_text(first.read_text())
    (folder / "run.toml").write_text(
        '[model]\nlayers = 2\nname = "llama"\n[train]\nsteps = 3\nlr = 1e-3\n'
        '[data]\nsource = "random"\nvalidation = 0.1\n'
    )


READERS = {
    "index": Reader("index.json", "json", write_corpus, corpus_in, is_same=True),
    "tokens of a corpus": Reader("00001.tokens.bin", "binary", write_corpus, corpus_in, is_same=True),
    "ends of documents": Reader("00000.documents.bin", "binary", write_corpus, corpus_in, is_same=True),
    "index, prepared again": Reader("index.json", "json", write_corpus, prepared_again, is_same=True),
    "settings": Reader("preparation.json", "json", write_corpus, prepared_again, is_same=True),
    "JSON lines": Reader("texts.jsonl", "json", write_jsonl, texts_in, lambda path: by_lines(path)),
    "JSON list": Reader("texts.json", "json", write_list, texts_in, lambda path: by_list(path)),
    "compressed text": Reader("texts.txt.gz", "binary", write_gzip, texts_in, is_same=True),
    "text": Reader(
        "run.toml", "text", write_configurations, texts_in, lambda path: [path.read_bytes().decode()]
    ),
    "Parquet": Reader("rows.parquet", "binary", write_table, rows_in),
    "Arrow": Reader("rows.arrow", "binary", write_table, rows_in),
    "NumPy": Reader("tokens.npy", "binary", write_tokens, tokens_in),
    "plain tokens": Reader("plain.bin", "binary", write_tokens, tokens_in),
    "tokens with a header": Reader("header.bin", "binary", write_tokens, tokens_in),
    "Megatron": Reader("megatron.idx", "binary", write_tokens, tokens_in),
    "tokenizer": Reader("tokenizer.json", "json", write_tokenizer, tokenized),
    "tokenizer's configuration": Reader("tokenizer_config.json", "json", write_tokenizer, tokenized),
    "special tokens": Reader("special_tokens_map.json", "json", write_tokenizer, tokenized),
    "tokenizer, in transformers": Reader("tokenizer.json", "json", write_tokenizer, chat_in),
    "configuration, in transformers": Reader("tokenizer_config.json", "json", write_tokenizer, chat_in),
    "chat template": Reader("chat_template.jinja", "text", write_tokenizer, chat_in),
    "hardware": Reader("hardware.toml", "text", write_configurations, lambda path: load_hardware(str(path))),
    "configuration": Reader(
        "run.toml",
        "text",
        write_configurations,
        lambda path: config_from_arguments(["--config", str(path)]),
    ),
}


def by_lines(path: Path) -> list[str]:
    """The texts of JSON lines by Python's own parser."""
    lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return texts_of([json.loads(line.decode("utf-8", "surrogatepass")) for line in lines if line.strip()])


def by_list(path: Path) -> list[str]:
    """The texts of a list in JSON by Python's own parser; of another file its text."""
    text = path.read_bytes().decode("utf-8-sig", "surrogatepass")
    is_list = text.lstrip().startswith("[") and text.lstrip()[1:].lstrip().startswith("{")
    return texts_of(json.loads(text)) if is_list else [text]


def texts_of(records: list[Any]) -> list[str]:
    """The texts of records, with `�` for halves of characters, without empty ones."""
    texts = [one["text"].encode("utf-16", "surrogatepass").decode("utf-16", "replace") for one in records]
    return [one for one in texts if one]


@pytest.mark.parametrize("name", [name for name in READERS if "transformers" not in name])
def test_a_mutated_file_is_read_as_it_is_or_refused(tmp_path: Path, name: str) -> None:
    read_mutations(tmp_path, name, 12)


@pytest.mark.full
@pytest.mark.parametrize("name", READERS)
def test_each_kind_of_data_file_survives_240_mutations(tmp_path: Path, name: str) -> None:
    read_mutations(tmp_path, name, 240)


def read_mutations(tmp_path: Path, name: str, most: int) -> None:
    """Read a file after each of its first mutations."""
    reader = READERS[name]
    (folder := tmp_path / "folder").mkdir()
    reader.make(folder)
    intact = (path := folder / reader.name).read_bytes()
    before = outcome(partial(reader.read, path))
    assert not isinstance(before, PlaitError)
    for mutation, mutate in islice(mutations(reader.kind, seed=16), most):
        remove(path)
        shutil.copytree(folder, again := tmp_path / "again", dirs_exist_ok=True)
        path.write_bytes(intact)
        mutate(path)
        try:
            found = outcome(partial(reader.read, path))
            if reader.is_same and not isinstance(found, PlaitError):
                assert found == before, mutation
            if reader.expected is not None and not isinstance(found, PlaitError):
                assert found == reader.expected(path), mutation
        except BaseException as error:
            error.add_note(f"{name}: {mutation}")
            raise
        shutil.rmtree(folder)
        again.rename(folder)
