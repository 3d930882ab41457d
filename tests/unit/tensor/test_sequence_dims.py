"""The sequence_dims of a sequence through layers, whose gradients are summed, and every refusal."""

from __future__ import annotations

import pytest
from torch import nn

from plait.errors import PlanError
from plait.plan.layout import Layout, Shard
from plait.rules import Rule, column, entrance, row, sequence, vocabulary
from plait.tensor.parallel.tensor_parallelism import SequenceDims, sequence_dims, summed_over_tp

WIDTH = 4


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def block() -> nn.Sequential:
    return nn.Sequential(linear(), linear())


def found(*kinds: str) -> list[SequenceDims]:
    """Of layers w: whole, p: in parts, t: in parts along another dim, h: a head, n: no linear is cut."""
    layers = [(str(number), block()) for number, _ in enumerate(kinds)]
    matched: dict[str, Rule] = {}
    for number, kind in enumerate(kinds):
        if kind != "w":
            matched[f"{number}"] = sequence.along(0) if kind == "t" else sequence
        if kind in "pt":
            matched |= {f"{number}.0": column, f"{number}.1": row}
        if kind == "h":
            matched[f"{number}.0"] = entrance
            matched[f"{number}.1"] = vocabulary
    return list(sequence_dims(layers, matched))


def flow(*values: int | None) -> SequenceDims:
    return SequenceDims(*values)


def test_without_the_rule_sequence_no_layer_runs_on_parts() -> None:
    assert found("w", "w") == [SequenceDims(), SequenceDims()]


def test_a_layer_on_whole_sequences_splits_its_output_for_the_next() -> None:
    assert found("w", "p", "p", "h") == [
        flow(None, None, None, 1),
        flow(1, 1, 1, 1),
        flow(1, 1, 1, 1),
        flow(1, 1, None, None),
    ]


def test_the_first_layer_is_given_the_whole_sequence() -> None:
    assert found("p", "n") == [flow(None, 1, 1, 1), flow(1, 1, 1, None)]


def test_a_layer_on_whole_sequences_gathers_the_parts_it_is_given() -> None:
    assert found("p", "w", "p") == [flow(None, 1, 1, 1), flow(1, None, None, 1), flow(1, 1, 1, None)]


def test_a_head_that_is_not_last_gives_the_whole_sequence() -> None:
    assert found("h", "w") == [flow(None, 1, None, None), SequenceDims()]
    assert found("h", "p") == [flow(None, 1, None, 1), flow(1, 1, 1, None)]


def test_the_split_dim_may_change_between_layers() -> None:
    assert found("p", "t") == [flow(None, 1, 1, 0), flow(0, 0, 0, None)]


def test_the_rule_sequence_on_a_submodule_is_refused() -> None:
    with pytest.raises(PlanError) as caught:
        sequence_dims([("a", block()), ("b", block())], {"b.1": sequence, "a": sequence})
    assert str(caught.value) == (
        "b.1 has the rule sequence, but is no layer of the model: give that rule to a whole layer, such as "
        "a, b …"
    )


def test_the_rule_sequence_on_a_vocabulary_sharded_embedding_is_refused() -> None:
    layer = nn.Sequential(nn.Embedding(8, WIDTH))
    with pytest.raises(PlanError) as caught:
        sequence_dims([("a", layer)], {"a": sequence, "a.0": vocabulary})
    assert str(caught.value) == (
        "a.0 is an embedding partitioned by vocabulary, whose ranks all look up the same tokens, but its "
        "layer has the rule sequence: remove that rule."
    )


def layouts(tp: int, *cut: nn.Parameter, whole: nn.Module, copies: int = 1) -> dict[int, Layout]:
    """Of all parameters of `whole`, of which some are cut along dim 0."""
    axes = {"replicate": 1, "shard": 2, "tp": tp}
    held = {id(parameter) for parameter in cut}
    return {
        id(parameter): Layout(parameter.shape, axes, {"tp": Shard(0, copies=copies)})
        if id(parameter) in held
        else Layout(parameter.shape, axes)
        for parameter in whole.parameters()
    }


def test_whole_parameters_of_layers_in_parts_are_summed_by_all() -> None:
    model = nn.Sequential(block(), block())
    first, second = model
    cut = first[0].weight, second[0].weight
    layers = [("0", first), ("1", second)]
    sums = summed_over_tp(layers, {"0": sequence}, layouts(4, *cut, whole=model))
    assert [sums[id(parameter)] for parameter in first.parameters()] == [1, 4, 4, 4]
    assert [sums[id(parameter)] for parameter in second.parameters()] == [1, 1, 1, 1]


def test_gradients_of_replicated_head_shards_are_summed_over_their_neighbours() -> None:
    layer = block()
    held = layouts(4, layer[0].weight, whole=layer, copies=2)
    for matched in ({"0": sequence}, {}):
        assert summed_over_tp([("0", layer)], matched, held)[id(layer[0].weight)] == 2


def test_a_parameter_of_two_layers_of_which_one_runs_on_parts() -> None:
    first, second = block(), block()
    second[0].weight = first[1].weight
    model = nn.Sequential(first, second)
    layers = [("0", first), ("1", second)]
    with pytest.raises(PlanError) as caught:
        summed_over_tp(layers, {"1": sequence}, layouts(2, whole=model))
    assert str(caught.value) == (
        "0.1.weight and 1.0.weight are one parameter, whole on every rank of tp, but only one of its layers "
        "has the rule sequence, or of its modules the rule replicated: give it to both, or to neither."
    )
    both = {"0": sequence, "1": sequence}
    assert summed_over_tp(layers, both, layouts(2, whole=model))[id(first[1].weight)] == 2
    cut = layouts(2, first[1].weight, whole=model)
    assert summed_over_tp(layers, {"1": sequence}, cut)[id(first[1].weight)] == 1
