"""PyTorch's side: the step of a rank with FSDP2 or DDP, on the same modules."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from work import DECAY, LIMIT, MICROBATCHES, RANKS, RATE, Step, build, values


def fsdp2(*, whole: str = "never", each: bool = False, units: str = "layers") -> Step:
    """Sums gradients after `each` micro-batch, else after the last one only.

    Parameters stay `whole` "never" (they are freed after a layer's forward and after its backward), for a
    "micro-batch" (until a layer's backward is done), or for the whole "step". What is gathered together is
    one of `units`: "layers" (plait's own), "inner" layers (those of blocks; the root has embedding and head),
    or "blocks" (two layers each, likewise).
    """
    sharded = build()
    mesh = init_device_mesh("cpu", (RANKS,))
    for module in (*_units(sharded, units), sharded):
        fully_shard(module, mesh=mesh, reshard_after_forward=whole == "never")
    sharded.to_empty(device="cpu")
    with torch.no_grad():
        for name, value in values():
            parameter = sharded.get_parameter(name)
            assert isinstance(parameter, DTensor)
            # Every rank has the value: nobody sends it.
            cut = distribute_tensor(value, mesh, parameter.placements, src_data_rank=None)
            parameter.copy_(cut)
    optimizer = _optimizer(sharded)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros(())
        for number in range(MICROBATCHES):
            last = number + 1 == MICROBATCHES
            sharded.set_requires_gradient_sync(each or last)
            sharded.set_reshard_after_backward(whole != "step" or last)
            total += _forward_backward(sharded, inputs[number : number + 1], targets[number : number + 1])
        return _finish(sharded, optimizer, total)

    return step


def _units(model: nn.Sequential, units: str) -> list[nn.Module]:
    blocks = list(model.get_submodule("blocks").children())
    inner = [layer for block in blocks for layer in block.children()]
    ends = [model.get_submodule("embedding"), model.get_submodule("head")]
    return {"layers": [*inner, *ends], "inner": inner, "blocks": blocks}[units]


def ddp() -> Step:
    """Sums gradients with the last micro-batch's backward."""
    plain = build()
    plain.to_empty(device="cpu")
    with torch.no_grad():
        for name, value in values():
            plain.get_parameter(name).copy_(value)
    replicated = DistributedDataParallel(plain, gradient_as_bucket_view=True)
    optimizer = _optimizer(replicated)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros(())
        for number in range(MICROBATCHES):
            with nullcontext() if number + 1 == MICROBATCHES else replicated.no_sync():
                total += _forward_backward(
                    replicated, inputs[number : number + 1], targets[number : number + 1]
                )
        return _finish(replicated, optimizer, total)

    return step


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, fused=True)


def _forward_backward(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()) / MICROBATCHES
    loss.backward()
    return loss.detach()


def _finish(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
    """Clip and update; the mean loss over the ranks."""
    nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
    optimizer.step()
    optimizer.zero_grad()
    distributed.all_reduce(loss)
    return loss / RANKS
