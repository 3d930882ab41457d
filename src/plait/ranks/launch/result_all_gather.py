"""All-gather of the results of a launcher's ranks, of any type: every rank gets all of them.

Plain values travel as JSON. Others are pickled, and a pickle runs what its sender chose: ranks accept one
from each other only with a signature by a secret that no other user knows, from a file that only this user
can read, or from the environment.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import pickle
import secrets
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from plait.errors import CommunicationError, PlaitError, listed
from plait.ranks import json_serialization
from plait.ranks.json_serialization import NotPlainError
from plait.ranks.launch.rank_job import dumps_result
from plait.ranks.transport.interface import Transport

SECRET = "PLAIT_SECRET"
"""The environment variable of the secret; for hosts without a common file system."""
_LEAST_SECRET = 16
_PLAIN, _PICKLED, _FAILED = b"V", b"P", b"E"
"""What a rank sends first: a plain value, the type of one that has to be pickled, an error."""


def all_gather_results(
    result: object, rank: int, size: int, transport: Transport | None, device: torch.device
) -> list[Any]:
    """Return the results of all ranks, by rank; every rank calls it.

    `size`: the number of ranks. `device`: of the tensors that are sent. Raises `PlaitError` on every rank
    where one has a result that cannot be sent. Communication: two all-gathers, of a number and of the
    results; where one is pickled, six more.
    """
    if transport is None:
        return [result]
    ranks = _ByteGather(rank, size, transport, device)
    texts = ranks.all_gather(_first_message(result, rank))
    for text in texts:
        if text[:1] == _FAILED:
            raise PlaitError(text[1:].decode(errors="replace"))
    others = {number: text[1:].decode() for number, text in enumerate(texts) if text[:1] == _PICKLED}
    pickles = _gathered_pickles(ranks, result if rank in others else None, others) if others else {}
    return [
        result
        if number == rank
        else pickles[number]
        if number in pickles
        else json_serialization.decode(text[1:].decode())
        for number, text in enumerate(texts)
    ]


def _first_message(result: object, rank: int) -> bytes:
    try:
        return _PLAIN + json_serialization.encode(result).encode()
    except NotPlainError as error:
        name = str(error)
    try:
        dumps_result(result, rank)
    except PlaitError as error:
        return _FAILED + str(error).encode()
    return _PICKLED + name.encode()


class _ByteGather:
    """All-gathers of bytes over all ranks, of unequal lengths."""

    def __init__(self, rank: int, size: int, transport: Transport, device: torch.device) -> None:
        self.rank, self._size, self._transport, self._device = rank, size, transport, device

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks, by rank."""
        sizes = self._gathered(torch.tensor([len(data)])).tolist()
        longest = max(1, *sizes)
        padded = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
        rows = self._gathered(padded).view(len(sizes), longest)
        return [row[:size].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]

    def _gathered(self, own: torch.Tensor) -> torch.Tensor:
        mine = own.to(self._device)
        whole = mine.new_empty(mine.numel() * self._size)
        self._transport.all_gather(mine, whole).wait()
        return whole.cpu()


def _gathered_pickles(ranks: _ByteGather, result: object, types: Mapping[int, str]) -> dict[int, Any]:
    """Return the results of the ranks in `types`, sent as signed pickles."""
    with _common_secret(ranks) as secret:
        if secret is None:
            told = listed([f"that of rank {rank} is a {name}" for rank, name in types.items()])
            raise PlaitError(
                f"results other than numbers, text, tensors and containers ({told}) are sent as pickles, "
                "which ranks accept from each other with a secret only, and these ranks share no folder for "
                f"one: set {SECRET} to one text of {_LEAST_SECRET} or more characters on all hosts."
            )
        data = dumps_result(result, ranks.rank) if ranks.rank in types else b""
        sealed = ranks.all_gather(_signature(secret, ranks.rank, data) + data)
    opened = {}
    for rank in types:
        signature, data = sealed[rank][:32], sealed[rank][32:]
        if not hmac.compare_digest(signature, _signature(secret, rank, data)):
            raise CommunicationError(
                f"the result of rank {rank} has a wrong signature: it is of another process."
            )
        if rank != ranks.rank:
            opened[rank] = pickle.loads(data)
    return opened


def _signature(secret: bytes, rank: int, data: bytes) -> bytes:
    return hmac.digest(secret, f"{rank}:".encode() + data, "sha256")


@contextmanager
def _common_secret(ranks: _ByteGather) -> Iterator[bytes | None]:
    """Yield the secret of all ranks, or None where they have none.

    That of the environment, else one that rank 0 has drawn, in a file of its own that the others read.
    """
    own = os.environ.get(SECRET, "")
    own = own if len(own) >= _LEAST_SECRET else ""
    path = _written_secret() if ranks.rank == 0 and not own else None
    try:
        paths = ranks.all_gather(b"" if path is None else os.fsencode(path))
        secret = own.encode() or _read_secret(paths[0])
        digests = ranks.all_gather(hashlib.sha256(b"plait" + secret).digest() if secret else b"")
        yield secret if secret and len(set(digests)) == 1 else None
    finally:
        if path is not None:
            path.unlink(missing_ok=True)


def _written_secret() -> Path | None:
    """Return a new file with a random secret, which only this user can read; None without a folder for it."""
    for folder in (Path("~/.cache/plait").expanduser(), Path(tempfile.gettempdir())):
        with suppress(OSError, RuntimeError):
            folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix="secret-", dir=folder)
            with os.fdopen(handle, "wb") as file:
                file.write(secrets.token_bytes(32))
            return Path(name)
    return None


def _read_secret(path: bytes) -> bytes:
    """Return the secret in a file of this user that no other can read; empty for any other file."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, ValueError):
        return b""
    with os.fdopen(handle, "rb") as file:
        about = os.fstat(handle)
        is_private = (
            stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & 0o077
        )
        return file.read(33) if is_private and about.st_size == 32 else b""
