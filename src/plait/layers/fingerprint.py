"""Fingerprints: short texts and hashes by which ranks check that they run the same model and step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from plait.autograd.dropout import Dropout
from plait.layers.layer_sequence import LayerSequence, bits_of
from plait.layers.nested import Microbatches, Value, tensors_of
from plait.plan import Plan
from plait.rules import Rule
from plait.schedules.schedule import Schedule


def fingerprint(
    sequence: LayerSequence, plan: Plan, counts: Sequence[int], rules: Mapping[str, Rule], seed: int
) -> str:
    """Return the call of `parallelize` as text, with a hash of the model's structure and of its rules."""
    digest = hashlib.blake2b(digest_size=8)
    for layer in sequence.layers:
        for name, parameter in layer.module.named_parameters():
            kind = f"{parameter.shape} {parameter.dtype} {parameter.requires_grad}"
            digest.update(f"{layer.path} {type(layer.module).__name__} {name} {kind}".encode())
        for name, buffer in layer.module.named_buffers():
            digest.update(f"{layer.path} {name} {buffer.shape} {buffer.dtype}".encode())
        for name, module in layer.module.named_modules():
            if isinstance(module, Dropout | nn.Dropout):
                digest.update(f"{layer.path} {name} {module.p} {module.training}".encode())
    digest.update(str(sequence.users).encode())
    digest.update(str(sorted(rules.items(), key=lambda item: item[0])).encode())
    return f"parallelize(model {digest.hexdigest()}, seed {seed}, layers per stage {tuple(counts)}, {plan})"


def fingerprint_of_order(order: Schedule) -> str:
    """Return a hash of a schedule: the actions of all ranks, in order."""
    rows = "\n".join(" ".join(row) for row in order.order)
    return hashlib.blake2b(rows.encode(), digest_size=8).hexdigest()


def fingerprint_of_tokens(*values: Value) -> str:
    """Return a hash of the integer CPU tensors in `values`, including those in items of `Microbatches`.

    Tensors on a GPU are left out: reading them would block the host.
    """
    digest = hashlib.blake2b(digest_size=8)
    whole = [list(value.values) if isinstance(value, Microbatches) else value for value in values]
    for tensor in tensors_of(whole):
        if tensor.device.type == "cpu" and not tensor.is_floating_point():
            digest.update(bits_of(tensor))
    return digest.hexdigest()


def fingerprint_of_values(values: Iterable[Tensor]) -> str:
    """Return a hash of the bits of all tensors in `values`, in order."""
    digest = hashlib.blake2b(digest_size=8)
    for value in values:
        digest.update(bits_of(value))
        del value  # before the next is read
    return digest.hexdigest()
