"""The token embedding whose table is cut by rows, that is, by vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from plait.autograd.deferred import embedding
from plait.autograd.paired_collectives import reduce
from plait.autograd.weight_queue import WeightGradientQueue
from plait.comm.group import Group
from plait.errors import DataError, ModelError
from plait.layout import divide
from plait.tensor.partition import AXIS, UNEVEN, column_layouts, piece_of


class VocabParallelEmbedding(nn.Module):
    """An embedding whose rows are cut over `group`, evenly or not: the first ranks may hold one more.

    Whole numbers `[...]` to `[..., embedding_dim]`, the same on every rank. Each rank looks up the tokens
    whose rows it holds and gives zeros for the others. Communication: one all-reduce of the output.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        group: Group,
        *,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """As `nn.Embedding(num_embeddings, embedding_dim)` would be made under the same seed, cut."""
        super().__init__()
        full = nn.Embedding(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self.num_embeddings, self.embedding_dim, self.group = num_embeddings, embedding_dim, group
        self.padding_idx = full.padding_idx
        layouts = column_layouts(num_embeddings, embedding_dim, UNEVEN, {AXIS: group.size}, "the table")
        self.layouts = {"weight": layouts["weight"]}
        self.queue: WeightGradientQueue | None = None
        self._own = divide(num_embeddings, group.size)[group.index]
        self.weight = piece_of(full.weight, self.layouts["weight"], group)

    @classmethod
    def of(cls, full: nn.Embedding, group: Group) -> VocabParallelEmbedding:
        """This rank's rows of a full embedding, which every rank has alike; its values are copied.

        ModelError for one that renormalises its rows, or scales or sparsifies their gradients.
        """
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(full, option):
                raise ModelError(
                    f"an embedding with {option} = {getattr(full, option)} cannot be cut by rows: make it "
                    "without."
                )
        sizes = full.num_embeddings, full.embedding_dim
        made = cls(*sizes, group, padding_idx=full.padding_idx, device="meta")
        made.weight = piece_of(full.weight, made.layouts["weight"], group)
        return made

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up, and sum over the group. DataError (on the CPU) for numbers that are no tokens."""
        if tokens.device.type == "cpu" and tokens.numel():
            self._refuse_strangers(tokens)
        first, count = self._own.start, len(self._own)
        local = tokens - first
        elsewhere = (local < 0) | (local >= count)
        padding = None if self.padding_idx is None else self.padding_idx - first
        if padding is not None and not 0 <= padding < count:
            padding = None
        rows = embedding(local.remainder(count), self.weight, padding, self.queue)
        return reduce(rows.masked_fill(elsewhere.unsqueeze(-1), 0), self.group)

    def extra_repr(self) -> str:
        """Sizes of the full table, and of how many pieces this is one."""
        return f"{self.num_embeddings} / {self.group.size}, {self.embedding_dim}"

    def _refuse_strangers(self, tokens: Tensor) -> None:
        # No rank holds such a row, so that all would give zeros and nobody an error.
        least, most = (int(bound) for bound in tokens.aminmax())
        if least < 0 or most >= self.num_embeddings:
            raise DataError(
                f"tokens from {least} to {most} were looked up in a table of {self.num_embeddings} rows: "
                "give tokens of the vocabulary."
            )
