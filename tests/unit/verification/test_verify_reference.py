"""The reference against plain PyTorch on the whole batch at once: the parity tests' own single device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from parity import reference as plain
from parity.case import EPSILON, LEARNING_RATE, SEED, Case
from parity.case import Recipe as PlainRecipe
from parity.cases import USER_CASES, gpt2, llama
from parity.norm import assert_close, assert_equal
from plait.errors import ModelError
from plait.models.layers.layer_sequence import bits_of, sequence_of
from plait.tensor.microbatches import split
from plait.tensor.nested_values import Value, map_tensors, tensors_of
from plait.verification.expected_dtypes import NumberFormats
from plait.verification.options import VerifyOptions
from plait.verification.reference.reference_run import ReferenceRun
from plait.verification.reference.reference_update import CLIP_FRACTION
from plait.verification.reference.rounding_errors import Perturbation
from plait.verification.reference.start_values import unchanged
from plait.verification.step_location import WHOLE_STEP, RecordKey, Records, RecordScope

DOUBLE = NumberFormats(compute=torch.float64)
TOLERANCE, ROWS, MICROBATCHES, CLIP = 1e-12, 4, 2, 0.05
CASES = {case.name: case for case in (*USER_CASES, gpt2(), llama(tied=False))}


def adamw(groups: list[dict[str, object]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, eps=EPSILON)


def reference_of(
    model: nn.Module, case: Case, clip: float | None = CLIP, perturbation: int = 0
) -> ReferenceRun:
    options = VerifyOptions(optimizer=adamw, seed=SEED, clip=clip)
    device = torch.device("cpu")
    return ReferenceRun(
        sequence_of(model), case.loss, options, unchanged, DOUBLE, device, Perturbation(perturbation), clip
    )


def recorded(case: Case, clip: float | None = CLIP, perturbation: int = 0) -> dict[RecordScope, Records]:
    """Two steps of a case, recorded."""
    reference = reference_of(case.build(), case, clip, perturbation)
    return dict(reference.run(case.batches(ROWS, 2, torch.float64), MICROBATCHES))


def of_kind(records: Records, kind: str) -> dict[str, Tensor]:
    """By the names of parameters."""
    return {key.name: value for key, value in records.items() if key.kind == kind}


def test_equals_autograd_on_the_whole_batch_at_once_and_contributions_of_all_uses_sum_to_it() -> None:
    for name, case in CASES.items():
        expected = plain.train(case, ROWS, PlainRecipe(steps=2, clip=CLIP), torch.float64)
        steps = list(by_step(recorded(case)))
        assert_equal(of_kind(steps[0][1], "final"), expected.gradients, TOLERANCE, f"{name}: the gradient")
        assert_equal(of_kind(steps[1][1], "value"), expected.parameters, TOLERANCE, f"{name}: the parameter")
        for (parts, records), loss, norm in zip(steps, expected.losses, expected.norms, strict=True):
            for kind, value in (("mean", loss), ("whole", loss), ("norm", norm), ("clip", CLIP)):
                assert_close(float(records[RecordKey(kind)]), value, TOLERANCE, f"{name}: the {kind}")
            final = of_kind(records, "final")
            sums = {parameter: torch.zeros_like(value) for parameter, value in final.items()}
            for part in parts:
                for key, value in part.items():
                    if key.kind == "contribution":
                        sums[key.name] += value
            assert len(parts) == MICROBATCHES
            assert_equal(sums, final, TOLERANCE, f"{name}: the sum")


def by_step(scopes: dict[RecordScope, Records]) -> Iterator[tuple[list[Records], Records]]:
    """Of each step its micro-batches' records, and those of the whole."""
    for step in range(2):
        yield (
            [scopes[RecordScope(step, number)] for number in range(MICROBATCHES)],
            scopes[RecordScope(step, WHOLE_STEP)],
        )


@pytest.mark.parametrize(
    "name", ["in_place", "convolution", "dictionary", "tuples", "skips", "views", "gpt2"]
)
def test_recorded_activations_and_their_gradients_equal_each_layer_called_by_itself(name: str) -> None:
    """Against each layer called by itself: nothing that was recorded is written over later."""
    case = CASES[name]
    model = plain.materialise(case.build(), torch.float64)
    (inputs, targets), _ = case.batches(ROWS, 2, torch.float64)
    weight = case.loss.weight(targets)
    scopes = recorded(case)
    parts = zip(split(inputs, MICROBATCHES, ""), split(targets, MICROBATCHES, ""), strict=True)
    for number, (value, wanted) in enumerate(parts):
        outputs: dict[RecordKey, Tensor] = {}
        for index, layer in enumerate([None, *sequence_of(model).layers]):
            value = copied(value if layer is None else layer.module(copied(value)))
            tensors = enumerate(tensors_of(value))
            outputs |= {RecordKey("output", index - 1, str(location)): tensor for location, tensor in tensors}
        leaves = {key: tensor for key, tensor in outputs.items() if tensor.requires_grad}
        total = case.loss.total(value, wanted) / weight
        gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        records = scopes[RecordScope(0, number)]
        assert_equal(
            {str(key): value for key, value in records.items() if key.kind == "output"},
            {str(key): value.detach() for key, value in outputs.items()},
            TOLERANCE,
            "the output",
        )
        assert_equal(
            {str(key): value for key, value in records.items() if key.kind == "gradient"},
            {
                str(key._replace(kind="gradient")): value
                for key, value in zip(leaves, gradients, strict=True)
                if value is not None
            },
            TOLERANCE,
            "the gradient",
        )


def copied(value: Value) -> Value:
    """Other memory, and a tensor of its own for each place, through which gradients go."""
    return map_tensors(torch.clone, value)


def test_a_parameter_of_several_layers_is_recorded_by_use() -> None:
    records = recorded(CASES["repeated"])[RecordScope(0, 0)]
    uses = [key.layer for key in records if key.kind == "contribution" and key.name == "0.weight"]
    assert uses == [0, 2, 4]
    values = [records[RecordKey("contribution", layer, "0.weight")] for layer in uses]
    assert not torch.equal(values[0], values[1])
    final = of_kind(recorded(CASES["repeated"])[RecordScope(0, WHOLE_STEP)], "final")
    assert sorted(final) == ["0.bias", "0.weight", "5.bias", "5.weight"]


def test_frozen_parameters_have_values_and_no_gradients() -> None:
    scopes = recorded(CASES["half_frozen"])
    whole = scopes[RecordScope(1, WHOLE_STEP)]
    frozen = {"0.weight", "3.weight", "4.bias"}
    assert not frozen & of_kind(whole, "final").keys()
    assert not frozen & {key.name for key in scopes[RecordScope(0, 0)] if key.kind == "contribution"}
    first = of_kind(scopes[RecordScope(0, WHOLE_STEP)], "value")
    assert all(torch.equal(first[name], whole[RecordKey("value", name=name)]) for name in frozen)


def test_the_state_of_the_optimizer_is_recorded_by_parameter() -> None:
    records = of_kind(recorded(CASES["in_place"])[RecordScope(1, WHOLE_STEP)], "state")
    assert {name.partition("/")[2] for name in records} == {"step", "exp_avg", "exp_avg_sq"}
    assert float(records["1.weight/step"]) == 2.0
    assert records["1.weight/exp_avg"].shape == (6, 8)


def test_gradients_are_clipped_to_a_third_of_the_first_norm_unless_told() -> None:
    scopes = recorded(CASES["in_place"], clip=None)
    first, second = (scopes[RecordScope(step, WHOLE_STEP)] for step in range(2))
    assert float(first[RecordKey("clip")]) == (float(first[RecordKey("norm")]) + 1e-6) * CLIP_FRACTION
    assert first[RecordKey("clip")] == second[RecordKey("clip")]
    final, clipped = of_kind(first, "final"), of_kind(first, "clipped")
    expected = {name: value / 3 for name, value in final.items()}
    assert_equal(clipped, expected, TOLERANCE, "the clipped gradient")


def test_the_last_recorded_moment_is_an_evaluation() -> None:
    case = CASES["moody"]
    model = plain.materialise(case.build(), torch.float64)
    *_, (scope, records) = reference_of(model, case).run(case.batches(ROWS, 1, torch.float64), 1)
    assert scope == RecordScope(1, WHOLE_STEP, evaluated=True)
    assert list(records) == [RecordKey("evaluation")]
    assert model.training


def test_a_loss_without_trained_parameters_is_recorded() -> None:
    """All is frozen: there are no gradients, and the parameters stay."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 5)).requires_grad_(False)
    case = Case("frozen", lambda: model, CASES["in_place"].draw)
    scopes = dict(reference_of(model, case).run(case.batches(ROWS, 1, torch.float64), MICROBATCHES))
    assert {key.kind for key in scopes[RecordScope(0, 0)]} == {"output", "total"}
    assert float(scopes[RecordScope(0, WHOLE_STEP)][RecordKey("norm")]) == 0.0


def test_the_model_given_is_not_altered() -> None:
    case = CASES["buffers"]
    model = case.build()
    before = {name: bits_of(value) for name, value in model.state_dict().items()}
    ids = [id(parameter) for parameter in model.parameters()]
    for _ in reference_of(model, case, perturbation=1).run(
        case.batches(ROWS, 2, torch.float64), MICROBATCHES
    ):
        pass
    assert {name: bits_of(value) for name, value in model.state_dict().items()} == before
    assert [id(parameter) for parameter in model.parameters()] == ids
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_a_layer_that_draws_random_numbers_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.AlphaDropout(0.5), nn.Linear(8, 5))
    case = Case("dropping", lambda: model, CASES["in_place"].draw)
    with pytest.raises(ModelError, match="1 draws random numbers, which depend on the layout"):
        list(reference_of(model, case).run(case.batches(ROWS, 1, torch.float64), MICROBATCHES))
    model[1].p = 0.0
    assert list(reference_of(model, case).run(case.batches(ROWS, 1, torch.float64), MICROBATCHES))


def test_the_batch_given_is_not_altered() -> None:
    case = CASES["in_place"]
    batches = case.batches(ROWS, 2, torch.float64)
    before = [bits_of(inputs) for inputs, _ in batches]
    list(reference_of(case.build(), case).run(batches, MICROBATCHES))
    assert [bits_of(inputs) for inputs, _ in batches] == before


def test_a_perturbed_run_is_close_to_the_reference_and_not_equal() -> None:
    plainly, shaken = (recorded(CASES["gpt2"], perturbation=number) for number in (0, 1))
    assert shaken.keys() == plainly.keys()
    for scope, records in plainly.items():
        assert shaken[scope].keys() == records.keys()
    one, two = (of_kind(run[RecordScope(0, WHOLE_STEP)], "final") for run in (plainly, shaken))
    assert_equal(two, one, 1e-11, "the gradient")
    assert not any(torch.equal(one[name], two[name]) for name in one)
