"""The token embedding partitioned by vocabulary, and an RMS norm of features that are partitioned over `tp`.

    y_t = w_t · x_t / sqrt(Σ_t Σ x_t² / features + eps)        one all-reduce of a number per position

Zhang & Sennrich 2019, "Root Mean Square Layer Normalization".
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_variadic

from plait.errors import DataError, ModelError
from plait.plan.layout.layout import divide
from plait.ranks.group import Group
from plait.tensor.autograd.deferred_weight_gradients import embedding
from plait.tensor.autograd.eager_operations import TRACE, RecordedPair
from plait.tensor.autograd.paired_collectives import copy, reduce
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue
from plait.tensor.parallel.partition import AXIS, UNEVEN, column_layouts, local_shard


class VocabParallelEmbedding(nn.Module):
    """An embedding whose rows are partitioned over `group`; the first ranks may hold one row more.

    Maps tokens `[...]` to `[..., embedding_dim]`, the same on every rank. Each rank looks up the tokens
    whose rows it holds; the output is the sum over the ranks. Communication: one all-reduce of the output.
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
        """Initialize a full `nn.Embedding` under the seed that all ranks share, and keep this rank's rows."""
        super().__init__()
        full = nn.Embedding(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self.num_embeddings, self.embedding_dim, self.group = num_embeddings, embedding_dim, group
        self.padding_idx = full.padding_idx
        layouts = column_layouts(num_embeddings, embedding_dim, UNEVEN, {AXIS: group.size}, "the table")
        self.layouts = {"weight": layouts["weight"]}
        self.queue: WeightGradientQueue | None = None
        self._own = divide(num_embeddings, group.size)[group.index]
        self.weight = local_shard(full.weight, self.layouts["weight"], group)

    @classmethod
    def of(cls, full: nn.Embedding, group: Group) -> VocabParallelEmbedding:
        """Return this rank's rows of a full embedding, which is equal on every rank. Copies the values.

        Raises ModelError for an embedding with `max_norm`, `scale_grad_by_freq` or `sparse`.
        """
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(full, option):
                raise ModelError(
                    f"an embedding with {option} = {getattr(full, option)} cannot be partitioned by rows: "
                    "leave that option out."
                )
        sizes = full.num_embeddings, full.embedding_dim
        made = cls(*sizes, group, padding_idx=full.padding_idx, device="meta")
        made.weight = local_shard(full.weight, made.layouts["weight"], group)
        return made

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of `tokens`, summed over the group.

        Raises DataError for tokens outside of the vocabulary, on the CPU only.
        """
        if tokens.device.type == "cpu" and tokens.numel():
            trace = TRACE.get()
            if trace is None:
                self._require_known(tokens)
            else:  # reads values, which a trace does not have
                tokens = trace.record(tokens, tokens.shape, RecordedPair(self._require_known))
        first, count = self._own.start, len(self._own)
        local = tokens - first
        elsewhere = (local < 0) | (local >= count)
        padding = None if self.padding_idx is None else self.padding_idx - first
        if padding is not None and not 0 <= padding < count:
            padding = None
        rows = embedding(local.remainder(count), self.weight, padding, self.queue)
        return reduce(rows.masked_fill(elsewhere.unsqueeze(-1), 0), self.group)

    def extra_repr(self) -> str:
        """Return the sizes of the full table, and the number of ranks."""
        return f"{self.num_embeddings} / {self.group.size}, {self.embedding_dim}"

    def _require_known(self, tokens: Tensor) -> Tensor:
        """Return `tokens`; on the meta device they have no values to check."""
        if tokens.is_meta:
            return tokens
        # No rank holds the row of an unknown token: without this check its embedding would be zero.
        least, most = (int(bound) for bound in tokens.aminmax())
        if least < 0 or most >= self.num_embeddings:
            raise DataError(
                f"tokens from {least} to {most} were looked up in a table of {self.num_embeddings} rows: "
                "give tokens of the vocabulary."
            )
        return tokens


class ParallelRMSNorm(nn.Module):
    """An RMS norm whose features are partitioned over `group`: `[..., features / size]` → the same shape.

    Computes in float32 at least. Communication: one all-reduce of the mean squares, one of their gradients.
    """

    def __init__(self, weight: nn.Parameter, epsilon: float | None, group: Group) -> None:
        """`weight`: this rank's shard. `epsilon`: None is that of the dtype in which the norm computes."""
        super().__init__()
        self.weight, self.epsilon, self.group = weight, epsilon, group

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's part of the normalized features."""
        return partitioned_rms_norm(x, self.weight, self.epsilon, self.group)


def partitioned_rms_norm(x: Tensor, weight: Tensor, epsilon: float | None, group: Group) -> Tensor:
    """Return this rank's part of the RMS norm of a tensor whose last dim is partitioned in equal parts.

    Overridable by a `TorchFunctionMode`.
    """
    if has_torch_function_variadic(x, weight):
        replaced: Tensor = handle_torch_function(partitioned_rms_norm, (x, weight), x, weight, epsilon, group)
        return replaced
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if epsilon is None:
        epsilon = torch.finfo(wide.dtype).eps
    mean = copy(reduce(wide.pow(2).mean(-1, keepdim=True), group), group) / group.size
    return (weight * (wide * torch.rsqrt(mean + epsilon))).to(x.dtype)
