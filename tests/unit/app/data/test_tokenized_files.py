"""Token arrays of other programs, opened in place."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from plait.app.data.token_arrays import holds_tokens, open_tokens
from plait.errors import DataError


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_token_arrays_are_read_as_they_are(tmp_path: Path, dtype: str) -> None:
    tokens = np.arange(60_000, dtype=dtype)
    tokens.tofile(tmp_path / "tokens.bin")
    np.save(tmp_path / "tokens.npy", tokens)
    for name in ("tokens.bin", "tokens.npy"):
        assert holds_tokens(name)
        opened = open_tokens(str(tmp_path / name), dtype)
        read = opened.read(0, len(opened))
        assert read.dtype == dtype
        assert np.array_equal(read, tokens)
        assert not opened.has_documents
    assert not holds_tokens("tokens.txt")


def test_token_arrays_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    def refused(name: str, match: str) -> None:
        with pytest.raises(DataError, match=match):
            open_tokens(str(tmp_path / name), "uint32")

    refused("none.bin", "does not exist")
    (tmp_path / "empty.bin").touch()
    refused("empty.bin", "is empty")
    (tmp_path / "odd.bin").write_bytes(b"123456")
    refused("odd.bin", r"has 6 bytes, which is no whole number of uint32 tokens: set data\.dtype")
    (tmp_path / "broken.npy").write_bytes(b"no array")
    refused("broken.npy", r"cannot be read as a \.npy array")
    np.save(tmp_path / "float.npy", np.zeros(3))
    refused("float.npy", r"holds float64 of shape \(3,\)")
    np.save(tmp_path / "square.npy", np.zeros((2, 2), dtype=np.uint16))
    refused("square.npy", r"holds uint16 of shape \(2, 2\)")
    np.savez(tmp_path / "several.npz", np.zeros(2, dtype=np.uint16))
    (tmp_path / "several.npz").rename(tmp_path / "several.npy")
    refused("several.npy", r"several\.npy is an archive of arrays: save the tokens as one \.npy array")
    header = np.array([20240801, 1, 0, *[0] * 253], dtype=np.int32).tobytes()
    (tmp_path / "none.bin").write_bytes(header + bytes(8))
    refused("none.bin", r"none\.bin has 0 tokens by its header, which is damaged")
    (tmp_path / "none.bin").write_bytes(header[:-1])
    refused("none.bin", r"none\.bin ends within its header")
    (tmp_path / "short.bin").write_bytes(np.array([20240801, 1, 1, *[0] * 253], dtype=np.int32).tobytes())
    refused("short.bin", r"short\.bin is empty: give token arrays with tokens")


def test_files_of_a_folder_are_one_corpus(tmp_path: Path) -> None:
    for number in range(3):
        np.arange(10 * number, 10 * number + 10, dtype=np.uint16).tofile(tmp_path / f"{number}.bin")
    for source in (str(tmp_path), str(tmp_path / "*.bin")):
        assert holds_tokens(source)
        assert open_tokens(source, "uint16").read(5, 20).tolist() == list(range(5, 25))
    (tmp_path / "README.txt").write_text("text")
    assert not holds_tokens(str(tmp_path))


@pytest.mark.parametrize(("magic", "dtype"), [(20240520, np.uint16), (20240801, np.uint32)])
def test_a_token_file_with_the_header_of_gpt2_trainers_is_read(
    tmp_path: Path, magic: int, dtype: type
) -> None:
    tokens, header = np.arange(40, dtype=dtype), np.zeros(256, dtype=np.int32)
    header[:3] = magic, 1, 40
    (tmp_path / "a.bin").write_bytes(header.tobytes() + tokens.tobytes())
    assert open_tokens(str(tmp_path / "a.bin"), "uint16").read(0, 40).tolist() == list(range(40))
    (tmp_path / "a.bin").write_bytes(header.tobytes() + tokens[:39].tobytes())
    with pytest.raises(DataError, match="has fewer than the 40 tokens of its header"):
        open_tokens(str(tmp_path / "a.bin"), "uint16")


def test_a_token_file_with_megatrons_index_is_read_and_a_damaged_index_refused(tmp_path: Path) -> None:
    """Four sequences in three documents, of which the second is empty."""
    sizes, documents = np.array([3, 2, 4, 1], dtype=np.int32), np.array([0, 2, 2, 4], dtype=np.int64)
    positions = np.zeros(4, dtype=np.int64)
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 4, len(sizes), len(documents))
    (tmp_path / "a.idx").write_bytes(head + sizes.tobytes() + positions.tobytes() + documents.tobytes())
    np.arange(10, dtype=np.int32).tofile(tmp_path / "a.bin")
    corpus = open_tokens(str(tmp_path / "a.bin"), "uint16")
    assert corpus.has_documents
    assert corpus.read(0, 10).tolist() == list(range(10))
    assert corpus.documents(0, 10).tolist() == [0] * 5 + [1] * 5
    assert corpus.document_count == 2
    assert holds_tokens(str(tmp_path))
    whole = (tmp_path / "a.idx").read_bytes()
    for code, dtype in ((1, np.uint8), (2, np.int8), (3, np.int16), (5, np.int64), (8, np.uint16)):
        np.arange(10, dtype=dtype).tofile(tmp_path / "a.bin")
        (tmp_path / "a.idx").write_bytes(whole[:17] + bytes([code]) + whole[18:])
        read = open_tokens(str(tmp_path / "a.bin"), "uint16").read(0, 10)
        assert (read.tolist(), read.dtype) == (list(range(10)), dtype)
    lengths, places = slice(34, 34 + 16), slice(34 + 48, None)
    damaged = {
        "short": whole[:-1],
        "no header": head[:20],
        "another file": b"x" + whole[1:],
        "version 2": whole[:9] + b"\2" + whole[10:],
        "dtype 6": whole[:17] + b"\6" + whole[18:],
        "negative length": whole[: lengths.start] + np.int32(-1).tobytes() + whole[lengths.start + 4 :],
        "negative place": whole[: places.start] + np.int64(-1).tobytes() + whole[places.start + 8 :],
        "descending": whole[: places.start] + np.array([0, 3, 2, 4], dtype=np.int64).tobytes(),
        "beyond the end": whole[: places.start] + np.array([0, 2, 2, 5], dtype=np.int64).tobytes(),
    }
    for name, data in damaged.items():
        (tmp_path / "a.idx").write_bytes(data)
        with pytest.raises(DataError, match=r"a\.idx is no index of Megatron's, or damaged"):
            open_tokens(str(tmp_path / "a.bin"), name)


def test_tokens_of_more_bytes_than_their_dtype_are_refused(tmp_path: Path) -> None:
    tokens = np.arange(70_000)
    tokens.astype(np.uint32).tofile(tmp_path / "32.bin")
    tokens.tofile(tmp_path / "64.bin")
    for dtype, file, remedy in (
        ("uint16", "32.bin", r'32-bit numbers: set data\.dtype to "uint32"'),
        ("uint16", "64.bin", r'set data\.dtype to "uint32"'),
        ("uint32", "64.bin", "64-bit numbers: write the tokens again as uint32"),
    ):
        with pytest.raises(DataError, match=remedy):
            open_tokens(str(tmp_path / file), dtype)
    (tokens % 4).astype(np.uint16).tofile(tmp_path / "few.bin")
    assert len(open_tokens(str(tmp_path / "few.bin"), "uint16")) == 70_000, "a vocabulary of four"
