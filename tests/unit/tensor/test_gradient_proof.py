"""Layers made by hand of paired collectives, on the meta device: right ones pass, each mistake is named."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from plait.errors import ModelError
from plait.models import gpt2
from plait.proof.gradient_proof import Claims, prove_layer
from plait.ranks.group import Group, Traffic
from plait.tensor.autograd.paired_collectives import (
    PairedCollective,
    collective_of,
    copy,
    gather,
    reduce,
    split,
)

TP = Group("tp", (0, 1), 0, None, Traffic(), 1.0)
HIDDEN, HEADS, VOCAB = 8, 4, 10


@pytest.fixture(autouse=True)
def _on_meta() -> Iterator[None]:
    with torch.device("meta"):
        yield


class Layer(nn.Module):
    """Modules by name and a function of them; those in `CUT` have the sizes of one rank's part."""

    CUT = ("query", "key", "value", "output", "up", "down", "token", "vocabulary")

    def __init__(self, run: Callable[..., object], **modules: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.run = run
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *inputs: Tensor) -> object:
        return self.run(self, *inputs)

    @property
    def cut(self) -> set[str]:
        names = {name for name, _ in self.named_parameters() if name.split(".")[0] in self.CUT}
        return names - {"output.bias", "down.bias"}


def attention(run: Callable[..., object], **more: nn.Module | nn.Parameter) -> Layer:
    parts = {name: nn.Linear(HIDDEN, HIDDEN // 2) for name in ("query", "key", "value")}
    return Layer(run, norm=nn.LayerNorm(HIDDEN), output=nn.Linear(HIDDEN // 2, HIDDEN), **parts, **more)


def mlp(run: Callable[..., object], **more: nn.Module | nn.Parameter) -> Layer:
    up, down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)
    return Layer(run, norm=nn.LayerNorm(HIDDEN), up=up, down=down, **more)


def row(linear: nn.Linear, input: Tensor) -> Tensor:
    """A linear cut by input features."""
    return reduce(functional.linear(input, linear.weight), TP) + linear.bias


def heads(tensor: Tensor) -> Tensor:
    return tensor.unflatten(-1, (HEADS // 2, -1)).transpose(1, 2)


def mix(layer: Layer, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    mixed = functional.scaled_dot_product_attention(query, key, value, mask)
    return row(layer.output, mixed.transpose(1, 2).flatten(2))


def attend(layer: Layer, entered: Tensor, mask: Tensor | None = None) -> Tensor:
    query, key, value = (heads(linear(entered)) for linear in (layer.query, layer.key, layer.value))
    return mix(layer, query, key, value, mask)


def widen(layer: Layer, entered: Tensor) -> Tensor:
    inner = functional.gelu(layer.up(entered))
    inner.mul_(2.0)
    inner[..., 0].zero_()
    return row(layer.down, functional.dropout(inner, 0.1))


def hidden(*, learns: bool = True) -> Tensor:
    return torch.empty(2, 3, HIDDEN, requires_grad=learns)


def tokens() -> Tensor:
    return torch.zeros(2, 3, dtype=torch.long)


def prove(layer: Layer, *inputs: Tensor, output_inside: bool = False, path: str = "blocks.0") -> None:
    given = layer(*inputs)
    outputs = given if isinstance(given, tuple) else (given,)
    parameters = {f"{path}.{name}": parameter for name, parameter in layer.named_parameters()}
    cut = {f"{path}.{name}" for name in layer.cut}
    prove_layer(path, inputs, outputs, parameters, Claims(sharded=cut, output_inside=output_inside))


def refused(layer: Layer, *inputs: Tensor) -> str:
    with pytest.raises(ModelError) as caught:
        prove(layer, *inputs)
    return str(caught.value)


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda tensor: copy(tensor, TP), "copy"),
        (lambda tensor: reduce(tensor * 2, TP), "reduce"),
        (lambda tensor: gather(tensor, TP, -1, 2 * HIDDEN), "gather"),
        (lambda tensor: split(tensor, TP, -1), "split"),
        (lambda tensor: tensor * 2, None),
    ],
)
def test_nodes_are_marked_by_the_functions_of_conjugate(
    function: Callable[[Tensor], Tensor], kind: PairedCollective | None
) -> None:
    """Relied on: what is written to a node's metadata stays there as long as the graph."""
    assert collective_of(get_gradient_edge(function(hidden())).node) == kind


def test_an_attention_with_an_entrance_is_accepted() -> None:
    def run(layer: Layer, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return x + attend(layer, copy(layer.norm(x), TP), mask), mask

    prove(attention(run), hidden(), torch.zeros(3, 3))


def test_an_attention_whose_columns_copy_their_input_is_accepted() -> None:
    def run(layer: Layer, x: Tensor) -> Tensor:
        query, key, value = (heads(linear(copy(x, TP))) for linear in (layer.query, layer.key, layer.value))
        return layer.norm(x + mix(layer, query, key, value))

    prove(attention(run), hidden())


@pytest.mark.parametrize("learns", [True, False])
def test_an_mlp_with_in_place_activation_and_dropout_is_accepted(learns: bool) -> None:
    """Where the input needs no gradient, a column linear may read it as it is."""
    prove(mlp(lambda layer, x: x + widen(layer, copy(layer.norm(x), TP))), hidden(learns=learns))
    prove(mlp(lambda layer, x: widen(layer, copy(x, TP))), hidden(learns=learns))


@pytest.mark.parametrize("frozen", [("up",), ("down",), ("norm",), ("up.weight", "down.weight")])
def test_frozen_parameters_are_not_in_the_graph(frozen: tuple[str, ...]) -> None:
    layer = mlp(lambda layer, x: x + widen(layer, copy(layer.norm(x), TP)))
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    prove(layer, hidden())


def test_a_layer_that_checkpoints_itself_is_accepted() -> None:
    def run(layer: Layer, x: Tensor) -> object:
        return checkpoint(lambda x: x + widen(layer, copy(layer.norm(x), TP)), x, use_reentrant=False)

    prove(mlp(run), hidden())


def look_up(layer: Layer, tokens: Tensor) -> Tensor:
    elsewhere = tokens >= VOCAB // 2
    rows = layer.token(tokens.masked_fill(elsewhere, 0))
    return reduce(rows.masked_fill(elsewhere.unsqueeze(-1), 0), TP)


def test_a_vocabulary_sharded_embedding_with_whole_positions_is_accepted() -> None:
    layer = Layer(
        lambda layer, tokens: look_up(layer, tokens) + layer.position,
        token=nn.Embedding(VOCAB // 2, HIDDEN),
        position=nn.Parameter(torch.empty(3, HIDDEN)),
    )
    prove(layer, tokens())


def head(*, gathered: bool) -> Layer:
    def run(layer: Layer, x: Tensor) -> Tensor:
        logits: Tensor = layer.vocabulary(copy(layer.norm(x), TP))
        return gather(logits, TP, -1, VOCAB) if gathered else logits

    return Layer(run, norm=nn.LayerNorm(HIDDEN), vocabulary=nn.Linear(HIDDEN, VOCAB // 2))


def test_a_head_with_sharded_or_gathered_logits_is_accepted() -> None:
    prove(head(gathered=False), hidden(), output_inside=True)
    prove(head(gathered=True), hidden())


def test_a_row_linear_that_splits_its_input_is_accepted() -> None:
    prove(
        mlp(lambda layer, x: row(layer.down, split(layer.wide(x), TP, -1)), wide=nn.Linear(8, 32)), hidden()
    )


def test_a_cut_parameter_is_known_by_each_of_its_names() -> None:
    x, weight = hidden(), nn.Parameter(torch.empty(HIDDEN, HIDDEN // 2))
    names = {"table": weight, "head.table": weight}
    for cut in names:
        with pytest.raises(ModelError, match=r"^layer: table is sharded over tp but reads a value"):
            prove_layer("layer", [x], [x @ weight], names, Claims(sharded={cut}, output_inside=True))


def test_a_deep_graph_with_shared_parts_is_accepted() -> None:
    def run(layer: Layer, x: Tensor) -> Tensor:
        entered = copy(x, TP)
        for _ in range(1200):
            entered = entered + entered
        return x + widen(layer, entered)

    prove(mlp(run), hidden())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(HIDDEN, HIDDEN)
        self.attention = nn.MultiheadAttention(HIDDEN, 2)
        self.idle = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        memory, _ = self.recurrent(x)
        mixed, weights = self.attention(memory, x, x)
        again = checkpoint(lambda y: y.sin(), mixed, use_reentrant=True)
        loose = torch.zeros(HIDDEN, requires_grad=True)
        return x, mixed + again, weights, x.detach(), x.transpose(0, 1), loose * again, self.idle.weight


@pytest.mark.parametrize(
    ("module", "input"),
    [
        (nn.Identity, hidden),
        (nn.Flatten, tokens),
        (lambda: nn.Embedding(VOCAB, HIDDEN, padding_idx=2), tokens),
        (lambda: nn.Sequential(nn.Linear(HIDDEN, 6), nn.ReLU(inplace=True), nn.Linear(6, 6)), hidden),
        (lambda: nn.TransformerEncoderLayer(HIDDEN, 2), hidden),
        (Recurrent, hidden),
        (lambda: gpt2(layers=1, hidden=HIDDEN, heads=2, vocab=VOCAB, context=3), tokens),
    ],
)
def test_a_layer_of_which_nothing_is_cut_passes(
    module: Callable[[], nn.Module], input: Callable[[], Tensor]
) -> None:
    layer, given = module(), input()
    output = layer(given)
    outputs: Iterable[Tensor] = output if isinstance(output, tuple) else (output,)
    prove_layer("0", [given], outputs, dict(layer.named_parameters()), Claims())


def test_a_missing_entrance_is_refused_with_the_remedy() -> None:
    assert refused(attention(lambda layer, x: x + attend(layer, layer.norm(x))), hidden()) == (
        "blocks.0: query.weight is sharded over tp but reads a value that has not entered a region (computed "
        "from norm.weight): give the module whose output it reads the rule entrance (column, if query.weight "
        "has the rule row), or use no entrances in this layer."
    )
    message = refused(mlp(lambda layer, x: x + widen(layer, x)), hidden())
    assert message.startswith("blocks.0: up.weight is sharded over tp but reads a value that has not entered")
    assert "(computed from the layer's input)" in message


def test_a_column_that_reads_past_the_entrance_is_refused() -> None:
    def run(layer: Layer, x: Tensor) -> Tensor:
        entered = copy(layer.norm(x), TP)
        query, key, value = heads(layer.query(entered)), heads(layer.key(x)), heads(layer.value(entered))
        return x + mix(layer, query, key, value)

    assert refused(attention(run), hidden()).startswith(
        "blocks.0: key.weight is sharded over tp but reads a value"
    )


def test_an_entrance_whose_output_goes_around_the_region_is_refused() -> None:
    def run(layer: Layer, x: Tensor) -> Tensor:
        entered = copy(layer.norm(x), TP)
        return entered + widen(layer, entered)

    assert refused(mlp(run), hidden()) == (
        "blocks.0: the output of the entrance also bypasses the region (Add combines it with a whole value, "
        "computed from down.bias): remove the entrance of this layer, so that each column linear copies "
        "its input by itself."
    )


def test_an_entered_layer_input_that_goes_around_the_region_is_refused() -> None:
    def run(layer: Layer, x: Tensor) -> Tensor:
        entered = copy(x, TP)
        return widen(layer, entered) + entered

    assert refused(mlp(run), hidden()).startswith("blocks.0: the output of the entrance also bypasses")


def test_an_entrance_whose_output_leaves_the_layer_is_refused() -> None:
    def run(layer: Layer, x: Tensor) -> tuple[Tensor, Tensor]:
        entered = copy(layer.norm(x), TP)
        return x + widen(layer, entered), entered

    assert refused(mlp(run), hidden()) == (
        "blocks.0: the output of the entrance leaves the layer, though a region ends where its layer does: "
        "remove the entrance of this layer."
    )


def test_a_value_that_enters_a_region_twice_is_refused() -> None:
    assert refused(mlp(lambda layer, x: widen(layer, copy(copy(x, TP).sin(), TP))), hidden()) == (
        "blocks.0: a value enters a region twice, so that its gradient would be summed twice: keep one of "
        "the entrances."
    )


def test_a_column_after_a_column_is_refused() -> None:
    def run(layer: Layer, x: Tensor) -> Tensor:
        return widen(layer, copy(layer.query(copy(x, TP)), TP))

    assert refused(mlp(run, query=nn.Linear(HIDDEN, HIDDEN)), hidden()) == (
        "blocks.0: a value computed with query.weight, which is sharded over tp, is one rank's part, but "
        "enters a region as if it were whole: give the linear that reads it the rule row and no entrance, or "
        "give one of the two no rule."
    )


def test_a_column_without_a_row_at_the_end_of_the_layer_is_refused() -> None:
    assert refused(mlp(lambda layer, x: layer.up(copy(x, TP)).relu()), hidden()) == (
        "blocks.0: its output is one rank's part, because up.weight is sharded over tp: give the linear "
        "behind it the rule row, or give it no rule (a linear with the rule vocabulary has to be the model's "
        "last)."
    )


def test_a_column_without_a_row_in_a_sum_is_refused() -> None:
    layer = mlp(lambda layer, x: x.repeat(1, 1, 2) + layer.up(copy(x, TP)).tanh())
    assert refused(layer, hidden()) == (
        "blocks.0: a value computed with up.weight, which is sharded over tp, is one rank's part, but Add "
        "combines it with a whole value (computed from the layer's input): give a linear between them the "
        "rule row, or the module that makes the whole value the rule entrance."
    )


def test_a_column_whose_output_a_whole_linear_reads_is_refused() -> None:
    layer = mlp(lambda layer, x: layer.wide(layer.up(copy(x, TP)).relu()), wide=nn.Linear(16, HIDDEN))
    assert refused(layer, hidden()).startswith("blocks.0: the whole parameter wide.weight is used inside")


def test_a_row_without_a_column_is_refused() -> None:
    layer = mlp(lambda layer, x: x + row(layer.down, layer.wide(x)), wide=nn.Linear(HIDDEN, 16))
    message = refused(layer, hidden())
    assert message.startswith(
        "blocks.0: down.weight is sharded over tp but reads a value that has not entered"
    )
    assert "(computed from wide.weight): give" in message
    layer.down.requires_grad_(False)
    assert refused(layer, hidden()) == (
        "blocks.0: a module sums over tp a value that is whole on every rank (computed from wide.weight): "
        "give the linear whose output it reads the rule column, or give it no rule."
    )


def test_a_whole_parameter_inside_a_region_is_refused() -> None:
    def run(layer: Layer, x: Tensor) -> Tensor:
        entered = copy(layer.norm(x), TP)
        query, key, value = (heads(linear(entered)) for linear in (layer.query, layer.key, layer.value))
        return x + mix(layer, layer.query_norm(query), key, value)

    layer = attention(run, query_norm=nn.LayerNorm(HIDDEN // HEADS))
    assert refused(layer, hidden()) == (
        "blocks.0: the whole parameter query_norm.weight is used inside a region, where each rank sees only "
        "its part of the gradient: give its module the rule replicated, or a rule that shards it, or remove "
        "the rules of this region."
    )
    layer.query_norm.requires_grad_(False)
    prove(layer, hidden())


def test_a_learned_mask_that_has_not_entered_is_refused() -> None:
    def run(layer: Layer, x: Tensor, mask: Tensor) -> Tensor:
        return x + attend(layer, copy(layer.norm(x), TP), mask.sin())

    message = refused(attention(run), hidden(), torch.zeros(3, 3, requires_grad=True))
    assert "is one rank's part, but" in message
    assert "(computed from the layer's input)" in message


def test_writing_a_sharded_value_into_a_view_of_a_whole_one_is_refused() -> None:
    def run(layer: Layer, x: Tensor) -> Tensor:
        base = x.repeat(1, 1, 2)
        base[..., :] = layer.up(copy(x, TP)).relu()
        base[:, 0] += layer.up(copy(x, TP))[:, 0].relu()
        return base

    assert refused(mlp(run), hidden()).startswith(
        "blocks.0: a value computed with up.weight, which is sharded over tp, is one rank"
    )


def test_a_sum_over_a_view_is_seen() -> None:
    """Autograd hides a function that writes to a view in a node of its own, which bears the mark then."""

    def run(layer: Layer, x: Tensor) -> Tensor:
        return x + reduce(functional.linear(layer.up(copy(x, TP)), layer.down.weight).view(2, 3, HIDDEN), TP)

    prove(mlp(run), hidden())


def test_a_frozen_parameter_may_be_used_inside() -> None:
    def run(layer: Layer, x: Tensor) -> Tensor:
        inside = layer.up(copy(layer.norm(x), TP)) * layer.scale.weight
        return x + reduce(functional.linear(inside, layer.down.weight), TP)

    layer = mlp(run, scale=nn.LayerNorm(16, bias=False))
    assert "the whole parameter scale.weight is used inside a region" in refused(layer, hidden())
    x = hidden()
    parameters = dict(layer.named_parameters())
    cut = {"up.weight", "up.bias", "down.weight"}
    prove_layer("0", [x], [layer(x)], parameters, Claims(sharded=cut, frozen={"scale.weight"}))


def test_a_loss_of_sharded_logits_needs_a_model_that_ends_inside_a_region() -> None:
    with pytest.raises(ModelError, match="its output is whole on every rank, though it has a linear with"):
        prove(mlp(lambda layer, x: x + widen(layer, copy(x, TP))), hidden(), output_inside=True)
