"""What ranks of a launcher return to each other: plain values, and signed pickles."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from plait.errors import CommunicationError, PlaitError
from plait.ranks.launch import result_all_gather
from plait.ranks.launch.launch import launch
from plait.ranks.launch.rank_pool import RankPool


class Mine:
    """A class of the user: it can only be pickled."""

    def __init__(self, rank: int) -> None:
        self.rank = rank


class Opened:
    """Its pickle makes a file where it is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def exchange(kind: str, folder: Path | None = None) -> Any:
    """Run within a world: launch calls the function there, and gathers what the ranks return."""
    results: dict[str, Any] = {
        "plain": {"rank": dist.get_rank(), "values": [torch.ones(2), (1.5, "é" * 9 ** dist.get_rank())]},
        "mine": Mine(dist.get_rank()),
        "mixed": Mine(0) if dist.get_rank() else "plain",
        "none": (one for one in "ab") if dist.get_rank() else 0,
        "opened": Opened(Path(str(folder), "opened")) if dist.get_rank() else 0,
    }
    try:
        return [getattr(one, "rank", one) for one in launch(lambda: results[kind])]
    except PlaitError as error:
        return f"{type(error).__name__}: {error}"


def test_results_of_plain_values_are_sent_without_pickles(rank_pool: RankPool) -> None:
    def run() -> Any:
        with patch("pickle.loads", side_effect=AssertionError):
            return exchange("plain")

    for found in rank_pool.run(run, ranks=2):
        assert [one["rank"] for one in found] == [0, 1]
        assert [one["values"][1] for one in found] == [(1.5, "é"), (1.5, "é" * 9)]
        assert torch.equal(found[0]["values"][0], torch.ones(2))


def without_folders() -> Any:
    with patch.object(result_all_gather, "_written_secret", lambda: None):
        return exchange("mine")


def with_a_secret_of_its_own() -> Any:
    os.environ["PLAIT_SECRET"] = f"0123456789abcdef{dist.get_rank()}"
    return exchange("mine")


def test_results_of_other_classes_are_pickled_and_signed_with_a_secret(
    rank_pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert rank_pool.run(exchange, "mine", ranks=3) == [[0, 1, 2]] * 3
    assert rank_pool.run(exchange, "mixed", ranks=2) == [["plain", 0]] * 2
    assert list((tmp_path / ".cache" / "plait").iterdir()) == []  # no secret is left there
    told = rank_pool.run(without_folders, ranks=2)
    assert all("that of rank 1 is a Mine) are sent as pickles" in one for one in told)
    monkeypatch.setenv("PLAIT_SECRET", "too short")
    assert rank_pool.run(without_folders, ranks=2) == told
    monkeypatch.setenv("PLAIT_SECRET", "0123456789abcdef")
    assert rank_pool.run(without_folders, ranks=2) == [[0, 1]] * 2
    assert rank_pool.run(with_a_secret_of_its_own, ranks=2) == told


def test_a_result_that_cannot_be_pickled_is_an_error_on_every_rank(rank_pool: RankPool) -> None:
    told = rank_pool.run(exchange, "none", ranks=2)
    assert all("rank 1's result, of type generator, cannot be sent" in one for one in told)


def test_a_pickle_with_a_wrong_signature_is_not_read(rank_pool: RankPool, tmp_path: Path) -> None:
    """Rank 1 stands for a process that has taken its place, and does not know the secret."""

    def run() -> Any:
        guessed = (lambda *_: bytes(32)) if dist.get_rank() else result_all_gather._signature
        with patch.object(result_all_gather, "_signature", guessed):
            return str(exchange("opened", tmp_path))

    zero, _ = rank_pool.run(run, ranks=2)
    assert zero.startswith(CommunicationError.__name__)
    assert "the result of rank 1 has a wrong signature" in zero
    assert not (tmp_path / "opened").exists()


def test_a_signature_is_of_the_secret_the_rank_and_every_byte() -> None:
    kinds = [(secret, rank, data) for secret in (b"s", b"t") for rank in (0, 1) for data in (b"", b"d", b"e")]
    assert len({result_all_gather._signature(*kind) for kind in kinds}) == len(kinds)


@pytest.mark.parametrize(
    "about", ["of another user", "open to others", "a link", "a pipe", "of another size"]
)
def test_a_secret_is_read_from_a_private_file_only(tmp_path: Path, about: str) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"s" * (32 if about != "of another size" else 31))
    path.chmod(0o600)
    if about != "of another size":
        assert result_all_gather._read_secret(os.fsencode(path)) == b"s" * 32
    if about == "of another user":
        if os.getuid():
            pytest.skip("only root gives files to another user")
        os.chown(path, 65534, -1)
    elif about == "open to others":
        path.chmod(0o640)
    elif about == "a link":
        path = tmp_path / "link"
        path.symlink_to(tmp_path / "secret")
    elif about == "a pipe":
        path = tmp_path / "pipe"
        os.mkfifo(path, 0o600)
    assert result_all_gather._read_secret(os.fsencode(path)) == b""
