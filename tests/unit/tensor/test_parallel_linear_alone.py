"""Column- and row-parallel linears as plain layers: made, stored, counted and refused."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from parallel_cases import WIDTH, assert_close, cut_block, defer, draw, full_block, linear
from torch import Tensor, nn

from plait.errors import PlanError
from plait.plan.layout import assemble
from plait.ranks import Count, Group, Handle, Mesh, Traffic, all_reduce
from plait.tensor.autograd import paired_collectives
from plait.tensor.autograd.weight_gradient_queue import INPUT_ONLY, WEIGHTS_NEXT, WeightGradientQueue
from plait.tensor.parallel.linear import ColumnParallelLinear, RegionBoundary, RowParallelLinear
from plait.tensor.parallel.partition import Partition


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layer", [ColumnParallelLinear, RowParallelLinear])
def test_a_parallel_linear_made_from_shapes_is_a_shard_of_the_full_linear_of_the_seed(
    rank_pool, layer, bias, dtype
):
    def body():
        torch.manual_seed(5)
        made = layer(WIDTH, 24, Mesh(tp=3).group("tp"), bias=bias, dtype=dtype)
        return made.layouts, {name: value.detach() for name, value in made.named_parameters()}

    torch.manual_seed(5)
    full = nn.Linear(WIDTH, 24, bias, dtype=dtype)
    layouts, parts = zip(*rank_pool.run(body, ranks=3), strict=True)
    assert [set(named) for named in parts] == [set(dict(full.named_parameters()))] * 3
    for name, parameter in full.named_parameters():
        assert torch.equal(assemble([named[name] for named in parts], layouts[0][name]), parameter)


def test_a_parallel_linear_copies_the_weights_and_keeps_requires_grad():
    group = Mesh().group("tp")
    full = linear(frozen="bias")
    for made in (ColumnParallelLinear.of(full, group), RowParallelLinear.of(full, group)):
        assert (made.weight.requires_grad, made.bias.requires_grad) == (True, False)
        assert torch.equal(made.weight, full.weight)
        assert made.weight.data_ptr() != full.weight.data_ptr()


def test_repeated_parts_lie_on_neighbouring_ranks(rank_pool):
    """4 heads of queries read 2 of keys: every two ranks hold the same head, and its gradient in part."""
    full = linear(WIDTH, 6)

    def body():
        group = Mesh(tp=4).group("tp")
        layer = ColumnParallelLinear.of(full, group, partition=Partition(parts=2, repeated=True))
        given = draw(5, WIDTH).requires_grad_()
        output = layer(given)
        output.backward(draw(5, 3, seed=group.index))
        return output.detach(), layer.weight.detach(), layer.layouts["weight"], given.grad

    outputs, weights, layouts, gradients = zip(*rank_pool.run(body, ranks=4), strict=True)
    wanted = full(draw(5, WIDTH)).detach()
    for rank in range(4):
        head = slice(0, 3) if rank < 2 else slice(3, 6)
        assert_close(outputs[rank], wanted[:, head], "output")
    assert torch.equal(assemble(list(weights), layouts[0]), full.weight)
    parts = [draw(5, 3, seed=rank) @ weights[rank] for rank in range(4)]
    assert_close(gradients[0], torch.stack(parts).sum(0), "gradient of the input")


def test_parallel_linears_make_the_listed_collectives(rank_pool):
    full = linear(WIDTH, 8)
    forms = {
        "column": partial(ColumnParallelLinear.of, full),
        "gathering": partial(ColumnParallelLinear.of, full, gather_output=True),
        "row": partial(RowParallelLinear.of, full),
        "whole": partial(RowParallelLinear.of, full, input_is_parallel=False),
    }

    def body():
        mesh, counts = Mesh(tp=2), {}
        for name, make in forms.items():
            layer = make(mesh.group("tp"))
            given = draw(5, WIDTH // 2 if name == "row" else WIDTH).requires_grad_()
            before = mesh.traffic.snapshot()
            output = layer(given)
            forward, between = mesh.traffic.since(before), mesh.traffic.snapshot()
            output.backward(torch.ones_like(output))
            counts[name] = forward, mesh.traffic.since(between)
        return counts

    float64 = 8
    input_sum = {"tp": {"all_reduce": Count(1, 5 * WIDTH * float64)}}
    output_sum = {"tp": {"all_reduce": Count(1, 5 * 8 * float64)}}
    for counts in rank_pool.run(body, ranks=2):
        assert counts == {
            "column": ({}, input_sum),
            "gathering": ({"tp": {"all_gather": Count(1, 5 * 4 * float64)}}, input_sum),
            "row": (output_sum, {}),
            "whole": (output_sum, {"tp": {"all_gather": Count(1, 5 * WIDTH // 2 * float64)}}),
        }


def test_without_gradients_a_column_linear_sends_and_keeps_nothing(rank_pool):
    def body():
        mesh = Mesh(tp=2)
        layer = cut_block(full_block(), mesh.group("tp"))
        queue = defer(layer)
        with torch.no_grad():
            outputs = [layer(draw(5, WIDTH).requires_grad_())]
        with torch.inference_mode():
            outputs.append(layer(draw(5, WIDTH)))
        return outputs, mesh.traffic.snapshot(), queue.take()

    full = full_block()
    for outputs, traffic, kept in rank_pool.run(body, ranks=2):
        assert_close(outputs[0], full(draw(5, WIDTH)).detach(), "output")
        assert torch.equal(*outputs)
        assert not outputs[0].requires_grad
        assert traffic == {"tp": {"all_reduce": Count(2, 2 * 5 * 8 * 8)}}
        assert kept == []


def test_an_input_without_gradient_is_not_summed(rank_pool):
    def body():
        mesh = Mesh(tp=2)
        layer = ColumnParallelLinear.of(linear(), mesh.group("tp"))
        layer(draw(5, WIDTH)).sum().backward()
        return mesh.traffic.snapshot(), layer.weight.grad is not None

    assert rank_pool.run(body, ranks=2) == [({}, True)] * 2


def test_parallel_linears_work_with_optimizers_state_dicts_and_deepcopy(rank_pool):
    def body():
        group = Mesh(tp=2).group("tp")
        layer = cut_block(full_block(), group)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        layer(draw(5, WIDTH)).square().sum().backward()
        optimizer.step()
        twin = copy.deepcopy(layer)
        assert twin[0].group is group
        again = cut_block(full_block(), group)
        again.load_state_dict(layer.state_dict())
        outputs = [one(draw(5, WIDTH)).detach() for one in (layer, twin, again)]
        twin[0].weight.data.zero_()
        return outputs, layer.state_dict().keys(), layer[0].weight.count_nonzero().item()

    full = full_block()
    full(draw(5, WIDTH)).square().sum().backward()
    torch.optim.SGD(full.parameters(), lr=0.1).step()
    for outputs, keys, untouched in rank_pool.run(body, ranks=2):
        for output in outputs:
            assert_close(output, full(draw(5, WIDTH)).detach(), "output")
        assert keys == full.state_dict().keys()
        assert untouched


class Diary(WeightGradientQueue):
    """A queue whose work, and the sums of `paired_collectives`, are written down."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def add(self, work: Any) -> None:
        def noted() -> None:
            self.events.append("work")
            work()

        super().add(noted)

    def all_reduce(self, tensor: Tensor, group: Group, **options: Any) -> Any:
        self.events.append("start")
        handle = all_reduce(tensor, group, **options)
        diary = self

        class Noted(Handle[Tensor]):
            def __init__(self) -> None:
                pass

            def wait(self) -> Tensor:
                diary.events.append("wait")
                return handle.wait()

        return Noted()


def test_weight_work_fills_the_time_of_the_input_gradients_sum(rank_pool):
    def body():
        group, results = Mesh(tp=2).group("tp"), []
        for overlap in (True, False):
            layer, diary = cut_block(full_block(), group), Diary()
            defer(layer)
            layer[0].queue = layer[2].queue = diary
            layer[0].boundary = RegionBoundary(group, overlap=diary.overlap)
            given = draw(5, WIDTH).requires_grad_()
            output = layer(given)
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(paired_collectives, "all_reduce", diary.all_reduce)
                diary.mode = WEIGHTS_NEXT if overlap else INPUT_ONLY
                output.backward(draw(5, 8, seed=9))
            diary.events.append("end")
            diary.run()
            results.append((diary.events, [given.grad, *(one.grad for one in layer.parameters())]))
        return results

    for (overlapped, bits), (deferred, same) in rank_pool.run(body, ranks=2):
        assert overlapped == ["start", "work", "work", "wait", "end"]
        assert deferred == ["start", "wait", "end", "work", "work"]
        assert all(torch.equal(*pair) for pair in zip(bits, same, strict=True))


def lonely(size: int) -> Group:
    """A group for what never communicates."""
    return Group("tp", tuple(range(size)), 0, None, Traffic(), 1.0)


@pytest.mark.parametrize("layer", [ColumnParallelLinear, RowParallelLinear])
def test_a_refusal_names_path_shape_and_degree(layer):
    with pytest.raises(PlanError) as caught:
        layer(10, 10, lonely(4), path="blocks.0.up")
    assert str(caught.value) == (
        "blocks.0.up with a weight of shape [10, 10] cannot be partitioned over tp = 4: its 10 features do "
        "not divide into 4; set tp to 1 or 2, or change the model's sizes."
    )


def test_repeated_parts_cannot_be_gathered():
    with pytest.raises(PlanError, match=r"keys with a weight of shape \[6, 4\] .* tp = 4 ranks.*tp to 2\."):
        ColumnParallelLinear(
            4, 6, lonely(4), partition=Partition(parts=2, repeated=True), gather_output=True, path="keys"
        )


def test_parallel_linears_on_meta_give_shapes_and_send_nothing():
    up = ColumnParallelLinear(WIDTH, 24, lonely(3), gather_output=True, device="meta")
    down = RowParallelLinear(24, 8, lonely(3), input_is_parallel=False, device="meta")
    given = torch.empty(2, 5, WIDTH, device="meta", requires_grad=True)
    output = down(up(given))
    output.sum().backward()
    assert output.shape == (2, 5, 8)
    assert given.grad.shape == given.shape
