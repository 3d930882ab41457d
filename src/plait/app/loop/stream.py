"""`Stream`: batches of an iterable that is larger than the disk, in the order of one reader on every layout.

Rank 0 reads, and hands each data-parallel rank its rows. In each step two numbers are broadcast over `world`,
and a scatter over `world` gives each rank the inputs and targets of its rows, padded to the longest share;
ranks that differ in `pp`, `cp` or `tp` only get the same. Over NCCL without Gloo the host waits for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from plait.app.data.batches import rank_rows
from plait.app.loop.stream_reader import Collate, Source, StreamReader
from plait.errors import DataError, PlaitError
from plait.plan.argument_checks import whole
from plait.plan.axes import index_along
from plait.ranks.collectives import broadcast, scatter
from plait.ranks.json_serialization import NotPlainError, decode, encode
from plait.ranks.mesh import Mesh
from plait.ranks.text_collectives import broadcast_result
from plait.tensor.nested_values import Value, list_of_tensors, map_tensors

_FAILED = -1
"""In place of the samples that are left: what follows is the text of an error."""
_HEAD = 8
"""Bytes of the length of a message's head."""
_GOES_ON = -2
"""In place of the samples that are left: batches follow."""


class Stream:
    """Batches of an iterable source in its own order, for `plait.fit`: rank 0 reads for all ranks.

    The source is a `StatefulDataLoader` of torchdata, a data set of Hugging Face with `streaming=True`, or
    any iterable with `state_dict` and `load_state_dict`. Checkpoints hold its position: a resumed run goes on
    with the next sample, on any number of ranks. At its end the source is iterated anew, without a gap.
    """

    def __init__(
        self,
        source: Source,
        *,
        batch: int | None = None,
        collate: Collate | None = None,
        epochs: int | None = None,
        seed: int = 0,
    ) -> None:
        """Read `batch` samples a step, over all ranks; `collate` makes (inputs, targets) of their list.

        A source with a `batch_size`, such as a `StatefulDataLoader`, yields batches: `batch` is that size,
        and `collate` changes a batch, where it is given. `epochs`: the run ends after so many, before a batch
        that they do not fill; None: never. Random numbers that the source draws from torch, numpy or random
        depend on `seed` and the batch. Raises `DataError` for a source that cannot be resumed, or that gives
        each rank a part.
        """
        _require_source(source)
        size = getattr(source, "batch_size", None)
        self._of_batches = isinstance(size, int)
        if self._of_batches and batch not in (None, size):
            raise DataError(
                f"a stream's batch is {batch}, and its source yields batches of {size}: give one of them."
            )
        if self._of_batches and getattr(source, "drop_last", True) is False:
            raise DataError(
                f"the source of a stream yields batches of {size}, and a smaller one at its end, which ranks "
                "cannot share: give it drop_last=True, or batch_size=None and the stream the batch."
            )
        given = size if self._of_batches else batch
        if given is None:
            raise DataError("a stream has no batch: give the number of samples of a step, over all ranks.")
        seed = whole("a stream's seed", seed, DataError, least=0)
        if epochs is not None:
            epochs = whole("a stream's epochs", epochs, DataError)
        if collate is not None and not callable(collate):
            raise DataError(f"a stream's collate is {collate!r}: give a function of a list of samples.")
        self.size = whole("a stream's batch", given, DataError)
        """Rows of a global batch."""
        self._source, self._collate, self._epochs, self._seed = source, collate, epochs, seed

    def on(self, mesh: Mesh) -> RankStream:
        """Return the `RankStream` of this rank, connected to the reader on rank 0; all ranks call it."""
        reader = StreamReader(
            self._source, self.size, self._seed, self._collate, self._of_batches, self._epochs
        )
        return RankStream(mesh, reader, self.size, self._seed, self._epochs)


class RankStream:
    """Gives one rank its rows of each batch of streamed data, for a training loop of your own."""

    def __init__(self, mesh: Mesh, reader: StreamReader, size: int, seed: int, epochs: int | None) -> None:
        """`reader` is used on rank 0 only."""
        self.size = size
        """Rows of a global batch."""
        self.step = 0
        """Number of batches that were read."""
        self.left: int | None = None
        """After the last batch of the last epoch the samples that fill no batch; None before."""
        self._mesh, self._reader, self._seed, self._epochs = mesh, reader, seed, epochs
        self._group = mesh.group("world")
        self._device = self._group.device_for_text(mesh.device)

    def share(self) -> tuple[Value, Value]:
        """Return (inputs, targets) of this data-parallel rank's rows of the next batch.

        All ranks call it. Raises `DataError` on every rank where reading fails on rank 0, and at the end.
        Communication: see above.
        """
        left, message = self._received(self._messages() if self._mesh.rank == 0 else None)
        if left == _FAILED:
            raise DataError(bytes(message.tolist()).decode())
        self.step, self.left = self.step + 1, None if left == _GOES_ON else left
        inputs, targets = _unpacked(message)
        return inputs, targets

    def batch(self, step: int, rows: slice) -> tuple[Value, Value]:
        """Return (inputs, targets) of this rank's `rows` of batch `step`. DataError for any but the next."""
        mine = rank_rows(self._mesh.index("dp"), self._mesh.size("dp"), self.size)
        if step != self.step or rows != mine:
            raise DataError(
                f"a stream gives batch {self.step}, rows {mine.start} to {mine.stop - 1}, next, and batch "
                f"{step} was asked for: its batches come in order, once; give a new Stream to each run."
            )
        return self.share()

    def describe(self) -> dict[str, Any]:
        """Return the settings, besides the source, that determine each step's samples."""
        return {"stream": True, "seed": self._seed}

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data as JSON values, the same on every rank; all ranks call it.

        Communication: two broadcasts over `world`.
        """
        found = broadcast_result(self._reader.state, DataError, self._group, self._mesh.device)
        return {"step": self.step, "ended": self._epochs if self.left is not None else None, "source": found}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the position in a `state_dict`, made under any plan; all ranks call it.

        Raises `DataError` for another state. Communication: two broadcasts over `world`.
        """
        step, ended, source = (state.get(name) for name in ("step", "ended", "source"))
        if not isinstance(step, int) or not isinstance(source, str):
            raise DataError(
                "the checkpoint holds no position of a stream: give the batches that it was written with."
            )

        def load() -> str:
            self._reader.load(source)
            return ""

        broadcast_result(load, DataError, self._group, self._mesh.device)
        self.step = step
        self.left = 0 if ended is not None and self._epochs is not None and ended >= self._epochs else None

    def _messages(self) -> tuple[int, list[Tensor]]:
        """Return, on rank 0, how many rows the next batch has, and the message with each rank's rows."""
        try:
            found = self._reader.next()
            ranks = self._mesh.size("dp")
            rows = [rank_rows(rank, ranks, self.size) for rank in range(ranks)]
            shares = [_packed(map_tensors(itemgetter(part), found.value)) for part in rows]
        except PlaitError as error:
            text = torch.frombuffer(bytearray(str(error).encode()), dtype=torch.uint8)
            return _FAILED, [text] * self._group.size
        of_rank = [
            index_along("dp", self._mesh.coordinate_of(rank), self._mesh.sizes) for rank in self._group.ranks
        ]
        return _GOES_ON if found.left is None else found.left, [shares[index] for index in of_rank]

    def _received(self, sent: tuple[int, list[Tensor]] | None) -> tuple[int, Tensor]:
        """Return how many rows the next batch has, and this rank's message from rank 0."""
        longest = 0 if sent is None else max(one.numel() for one in sent[1])
        head = torch.tensor([0 if sent is None else sent[0], longest], device=self._device)
        left, longest = (
            broadcast(head, self._group, checked=False).about("the size of a batch").wait().tolist()
        )
        out = torch.empty(longest, dtype=torch.uint8, device=self._device)
        parts = None
        if sent is not None:
            padded = [torch.nn.functional.pad(one, (0, longest - one.numel())) for one in sent[1]]
            parts = torch.cat(padded).to(self._device)
        message = scatter(parts, self._group, out=out, checked=False).about("a batch of the stream").wait()
        return left, message if left != _FAILED else message.cpu()


def _packed(value: Value) -> Tensor:
    """Return a value as bytes: the length of a head, the head, which numbers the tensors, and the tensors."""
    tensors = list_of_tensors(value)
    numbers = iter(range(len(tensors)))
    numbered = map_tensors(lambda tensor: torch.tensor(next(numbers)), value)
    try:
        head = encode((numbered, [(one.dtype, one.shape) for one in tensors])).encode()
    except NotPlainError as error:
        raise DataError(
            f"a batch of the stream holds an object of {error}: give tensors, and containers of them, "
            "numbers and text."
        ) from None
    start = torch.frombuffer(bytearray(len(head).to_bytes(_HEAD, "little") + head), dtype=torch.uint8)
    contiguous = (one.detach().cpu().contiguous().reshape(-1) for one in tensors)
    return torch.cat([start, *(one.view(torch.uint8) for one in contiguous)])


def _unpacked(message: Tensor) -> Value:
    """Return the value of which `_packed` has made the message, with tensors on the message's device."""
    at = _HEAD + int.from_bytes(bytes(message[:_HEAD].tolist()), "little")
    numbered, kinds = decode(bytes(message[_HEAD:at].tolist()).decode())
    tensors = []
    for dtype, shape in kinds:
        size = shape.numel() * dtype.itemsize
        tensors.append(message[at : at + size].clone().view(dtype).reshape(shape))
        at += size
    return map_tensors(lambda number: tensors[int(number)], numbered)


def _require_source(source: object) -> None:
    """Raise `DataError` for a source that has no position, or gives one rank a part of the data only."""
    name = type(source).__name__
    if isinstance(source, type):
        raise DataError(f"the source of a stream is the class {source.__name__}: give an object of it.")
    if not hasattr(source, "__iter__"):
        raise DataError(f"the source of a stream is an object of {name}, which is no iterable: give one.")
    if not isinstance(source, Source):
        raise DataError(
            f"the source of a stream is an object of {name} without state_dict and load_state_dict, so that "
            "a run could not go on where it was stopped: give a StatefulDataLoader of torchdata, a data set "
            "with streaming=True, an iterable of your own with both, or plait.Loader a map-style dataset."
        )
    is_divided = any(  # by `datasets.split_dataset_by_node`
        getattr(one, "_distributed", None) is not None for one in (source, getattr(source, "dataset", None))
    )
    if is_divided or isinstance(getattr(source, "sampler", None), DistributedSampler):
        raise DataError(
            f"the source of a stream ({name}) gives each rank a part of the data, and rank 0 reads for all "
            "ranks: leave its DistributedSampler or split_dataset_by_node out."
        )
