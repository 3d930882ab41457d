"""PyTorch's side: one plain process, DDP and FSDP2, on the same modules."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from work import LIMIT, Trainee, Work, optimizer_of, with_values

from plait.ranks.accelerator import is_accelerator, sent


def plain(work: Work, ranks: int, device: torch.device) -> Trainee:
    """Return the step of one process without communication."""
    assert ranks == 1
    return _trainee(work, with_values(work, device, torch.bfloat16), device, lambda last: nullcontext())


def compiled(
    work: Work, ranks: int, device: torch.device, *, mode: str | None = None, float8: str | None = None
) -> Trainee:
    """Return the step of one process with each block compiled, and the loss; `mode`: that of `torch.compile`.

    With "reduce-overhead" graphs overwrite their results, so gradients are added to memory of their own.
    `float8`: torchao's recipe for the linears of blocks.
    """
    assert ranks == 1
    model = with_values(work, device, torch.bfloat16)
    if float8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(float8)  # type: ignore[arg-type]
        convert_to_float8_training(model.get_submodule("blocks"), config=config)
    for block in model.get_submodule("blocks").children():
        block.compile(mode=mode)
    loss = torch.compile(_mean_loss, mode=mode)
    trainee = _trainee(work, model, device, _new_graph_step if mode else lambda last: nullcontext(), loss)
    if mode:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        kept = partial(trainee.optimizer.zero_grad, set_to_none=False)
        trainee.optimizer.zero_grad = kept  # type: ignore[method-assign]
    return trainee


def _new_graph_step(last: bool) -> AbstractContextManager[object]:
    torch.compiler.cudagraph_mark_step_begin()
    return nullcontext()


def ddp(work: Work, ranks: int, device: torch.device) -> Trainee:
    """Return the step of DDP, which sums gradients in the last micro-batch's backward."""
    model = with_values(work, device, torch.bfloat16)
    where = [device.index] if is_accelerator(device) else None
    replicated = DistributedDataParallel(model, device_ids=where, gradient_as_bucket_view=True)
    return _trainee(work, replicated, device, lambda last: nullcontext() if last else replicated.no_sync())


def fsdp2(
    work: Work, ranks: int, device: torch.device, *, each: bool = False, masters: bool = False
) -> Trainee:
    """Return the step of FSDP2, with a unit for each block; embedding and head belong to the root.

    Gradients are summed after `each` micro-batch, else after the last one only. With `masters` the
    optimizer's parameters, and sums of gradients, are in fp32.
    """
    from torch.distributed.device_mesh import init_device_mesh  # here, since they take a second
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    sharded = with_values(work, device, torch.float32 if masters else torch.bfloat16)
    mesh = init_device_mesh(device.type, (ranks,))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if masters else MixedPrecisionPolicy()
    for module in (*sharded.get_submodule("blocks").children(), sharded):
        fully_shard(module, mesh=mesh, mp_policy=policy)

    def before(last: bool) -> AbstractContextManager[object]:
        assert isinstance(sharded, FSDPModule)
        sharded.set_requires_gradient_sync(each or last)
        return nullcontext()

    return _trainee(work, sharded, device, before)


PEERS: dict[str, Callable[[Work, int, torch.device], Trainee]] = {
    "plain PyTorch": plain,
    "DDP": ddp,
    "FSDP2": fsdp2,
    "FSDP2, reduced each": partial(fsdp2, each=True),
    "FSDP2, masters fp32": partial(fsdp2, masters=True),
}


def _mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _trainee(
    work: Work,
    model: nn.Module,
    device: torch.device,
    around: Callable[[bool], AbstractContextManager[object]],
    mean_loss: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Trainee:
    """Return the step of `model`; the context `around(last)` is entered for each micro-batch."""
    mean_loss = mean_loss or _mean_loss
    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    optimizer = optimizer_of(model.parameters())

    def forward_backward(inputs: Tensor, targets: Tensor) -> Tensor:
        inputs, targets = sent(inputs, device), sent(targets, device)
        total = torch.zeros((), device=device)
        for number in range(work.microbatches):
            rows = slice(number * work.rows, (number + 1) * work.rows)
            with around(number + 1 == work.microbatches):
                loss = mean_loss(model(inputs[rows]), targets[rows]) / work.microbatches
                loss.backward()
            total += loss.detach()
        if ranks > 1:
            distributed.all_reduce(total)
        return total / ranks

    def update() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()

    return Trainee(rank, ranks, forward_backward, update, optimizer)
