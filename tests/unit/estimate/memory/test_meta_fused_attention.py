from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.estimate.memory.fused_operations import fused_operation
from plait.estimate.memory.storage_tracker import StorageTracker
from plait.models.gpt2 import Attention as OfGPT2
from plait.models.llama import Attention as OfLlama


class Attends(nn.Module):
    """Attention of three projections of its input, with options of `scaled_dot_product_attention`."""

    def __init__(self, *, heads: int = 4, keys: int = 4, **options: Any) -> None:
        super().__init__()
        self.heads, self.keys, self.options = heads, keys, options

    def forward(self, x: Tensor) -> Tensor:
        queries = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        keys = x[..., : self.keys * queries.shape[-1]].unflatten(-1, (self.keys, -1)).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(queries * 2, keys * 3, keys * 4, **self.options)
        return mixed.transpose(1, 2).flatten(2)


class Masked(Attends):
    """With a mask on the device of its input: of truth values, or one that learns."""

    def __init__(self, *, learns: bool = False) -> None:
        super().__init__()
        self.learns = learns

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(16, 16, dtype=x.dtype if self.learns else torch.bool, device=x.device).tril()
        self.options = {"attn_mask": mask.requires_grad_(self.learns)}
        return super().forward(x)


class Narrow(Attends):
    """Whose values have fewer features than its keys."""

    def forward(self, x: Tensor) -> Tensor:
        queries = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(queries * 2, queries * 3, queries[..., :6] * 4)
        return mixed.transpose(1, 2).flatten(2)


def kept_bytes(layer: nn.Module, device: str, dtype: torch.dtype) -> int:
    """What autograd keeps of a layer's run beside parameters."""
    layer = copy.deepcopy(layer).to_empty(device=device).to(dtype)
    own = {id(parameter.untyped_storage()) for parameter in layer.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in own:
            kept[id(storage)] = storage
        return tensor.detach()

    x = torch.empty(2, 16, 32, device=device, dtype=dtype, requires_grad=True)
    with torch.device(device), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        if device == "meta":
            with StorageTracker():
                output = layer(x)
        else:
            output = layer(x)
    del output
    return sum(storage.nbytes() for storage in kept.values())


CASES = {
    "gpt2": OfGPT2(32, 4, 16, 0.1),
    "llama": OfLlama(32, 4, 2, 16, 1e4, 0.1),
    "causal": Attends(is_causal=True),
    "grouped": Attends(keys=2, enable_gqa=True),
    "masked": Masked(),
    "learning": Masked(learns=True),
    "narrow values": Narrow(),
    "one head": Attends(heads=1, keys=1),
    "dropping": Attends(dropout_p=0.5),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_fused_attention_on_meta_keeps_the_bytes_that_a_device_keeps(name: str, dtype: torch.dtype) -> None:
    assert kept_bytes(CASES[name], "meta", dtype) == kept_bytes(CASES[name], "cpu", dtype)


@pytest.mark.parametrize("name", ["causal", "grouped", "masked", "one head"])
def test_fused_attention_in_bf16_on_meta_keeps_the_bytes_of_a_cpu(name: str) -> None:
    """Norms keep less on a CPU than elsewhere, so here without."""
    half = torch.bfloat16
    assert kept_bytes(CASES[name], "meta", half) == kept_bytes(CASES[name], "cpu", half)


def test_fused_attention_on_meta_does_not_keep_the_attention_weights() -> None:
    """PyTorch's own way on meta keeps it twice."""
    fused, parts = (kept_bytes(CASES[name], "meta", torch.float32) for name in ("causal", "dropping"))
    assert parts - fused > 2 * 4 * 16 * 16 * 4  # rows, heads, queries, keys, bytes


@pytest.mark.parametrize("dims", [1, 2])
def test_an_rms_norm_of_a_gpu_has_gradients_of_its_weight_for_any_outer_dims(dims: int) -> None:
    """Of a vector too, whose sum over no dims torch takes for one over all."""
    given = torch.randn([3, 8][-dims:], dtype=torch.float64, device="meta", requires_grad=True)
    weight = torch.ones(8, dtype=torch.float64, device="meta", requires_grad=True)
    norm = fused_operation(functional.rms_norm, (given, [8], weight), {}, on_cpu=False)
    assert norm is not None
    norm(given, [8], weight).sum().backward()
    for one in (given, weight):
        assert one.grad is not None
        assert one.grad.shape == one.shape


def test_no_fused_kernel_of_a_gpu_computes_attention_in_float64() -> None:
    call = tuple(torch.empty(1, 2, 4, 8, dtype=torch.float64, device="meta") for _ in range(3))
    for on_cpu in (True, False):
        fused = fused_operation(functional.scaled_dot_product_attention, call, {}, on_cpu=on_cpu)
        assert (fused is not None) is on_cpu
