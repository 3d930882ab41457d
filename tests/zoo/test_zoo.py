"""The verifier names each mistake of the zoo: its phase, layer, parameter, micro-batch, step and ranks."""

import pytest

from plait.errors import CommunicationError, ModelError
from plait.verification.options import VerifyOptions
from plait.verification.rank_verification import verify_rank
from plait.verification.verify import build_report
from zoo.backward import BACKWARD
from zoo.balancing import BALANCING
from zoo.bounds import BOUNDS
from zoo.cases import GPT2, TWO_COPIES
from zoo.chunks import CHUNKS
from zoo.context import CONTEXT
from zoo.definitions import DEFINITIONS
from zoo.dropping import DROPPING
from zoo.exchange_of_tokens import EXCHANGE_OF_TOKENS
from zoo.expert_gradients import EXPERT_GRADIENTS
from zoo.experts_of_tokens import EXPERTS_OF_TOKENS
from zoo.fine_tuning import ADAPTED, ADAPTED_AND_DROPPING, FINE_TUNING
from zoo.float8_experts import FLOAT8_EXPERTS
from zoo.float8_linears import FLOAT8
from zoo.forward import FORWARD
from zoo.four import FOUR
from zoo.losses import LOSSES
from zoo.models import RANDOM
from zoo.passing import PASSING, SENT_ON
from zoo.precision import PRECISION, TWO_NATIVE_STEPS
from zoo.reductions import REDUCTIONS
from zoo.router_losses import ROUTER_LOSSES
from zoo.routing import ROUTING
from zoo.row import case_of, report_of
from zoo.saving import SAVING
from zoo.scaling import HALF, SCALING, scale_grows_on_one_rank
from zoo.scattering import SCATTERING
from zoo.sequence import SEQUENCE
from zoo.sharding import SHARDING
from zoo.sinks_and_latents import SINKS_AND_LATENTS
from zoo.stepping import STEPPING
from zoo.updates import UPDATES
from zoo.weights import WEIGHTS
from zoo.whole_matrices import WHOLE_MATRICES

TABLES = (
    FORWARD,
    LOSSES,
    CHUNKS,
    BACKWARD,
    WEIGHTS,
    REDUCTIONS,
    UPDATES,
    FOUR,
    SHARDING,
    SCATTERING,
    DROPPING,
    SEQUENCE,
    CONTEXT,
    DEFINITIONS,
    PASSING,
    SAVING,
    FINE_TUNING,
    STEPPING,
    BOUNDS,
    PRECISION,
    SCALING,
    SINKS_AND_LATENTS,
    ROUTING,
    BALANCING,
    EXPERTS_OF_TOKENS,
    EXCHANGE_OF_TOKENS,
    EXPERT_GRADIENTS,
    ROUTER_LOSSES,
    WHOLE_MATRICES,
    FLOAT8,
    FLOAT8_EXPERTS,
)
ROWS = tuple(row for table in TABLES for row in table)
EXACT = VerifyOptions(mode="exact", steps=1)
IN_ONE_STEP = (row for row in (*SHARDING, *SCATTERING) if not row.named.step)
SEEN_BY_EXACT = (
    *FORWARD,
    *BACKWARD,
    *WEIGHTS,
    *REDUCTIONS,
    *FOUR,
    *IN_ONE_STEP,
    *SEQUENCE,
    *CONTEXT,
    *FINE_TUNING,
    *ROUTING,
    *EXPERTS_OF_TOKENS,
    *EXCHANGE_OF_TOKENS,
    *EXPERT_GRADIENTS,
    *(row for row in (*FLOAT8, *FLOAT8_EXPERTS) if not row.named.step),
)
UNSEEN_BY_EXACT = {
    "inputs_in_single_precision": "float32 has room for small whole numbers",
    "hidden_state_sent_in_single_precision": "likewise",
    "norm_in_single_precision": "likewise",
    "rounded_to_single_precision": "likewise",
    "added_up_in_single_precision": "likewise",
    "reduced_in_single_precision": "likewise",
    "norm_over_a_shard": "norms have a stand-in that does not look at other features",
    "buffers_given_back_too_soon": "a stand-in keeps no input for its backward",
    "gradients_of_the_step_before_stay": "there is one step",
    "norm_inside_the_region": "gradients of parts fold otherwise, so that the input gradient differs",
    "other_values_on_one_rank": "a model with values of its own is refused where ranks do not agree on them",
    "copy_differs": "likewise",
    "flat_shards_do_not_decay": "nothing decays",
    "dropout_counts_from_the_part": "there are no whole numbers left, so that it is refused",
    "blocks_added_without_rescaling": "that is how blocks of the stand-in are merged",
    "backward_with_the_blocks_own_sum": "the stand-in has no weights to normalise",
    "backward_of_the_reduction_scaled": "the loss ends in a reduction, so that it begins there",
    "mean_square_of_own_features": "norms have a stand-in that does not look at other features",
    "answers_one_later": "targets are replaced by weights of all outputs",
    "weights_not_normalized": "weights of experts have a stand-in that does not divide by their sum",
    "gradient_of_chosen_scores_only": "likewise; the mistake divides already in the forward",
    "softmax_over_tokens": "a softmax has a stand-in that does not look at other scores",
    "logits_in_single_precision": "float32 has room for small whole numbers",
    "chosen_by_scores_in_bfloat16": "likewise",
    "correction_left_out": "corrections are rounded, here to 0",
    "experts_of_all_groups": "the largest of few whole numbers are in the groups that are chosen",
    "groups_by_their_largest_score": "likewise",
    "adapters_not_summed_over_etp": "its adapters are scaled by 5 / 3, so that it is refused",
    "tokens_beyond_a_capacity_dropped": "no expert has so many tokens by these scores",
    "idle_experts_lose_their_state": "there is one step",
    "moments_of_another_rank_of_ep": "nothing is saved and loaded",
    "experts_loaded_in_another_order": "likewise",
    "second_rank_of_ep_not_saved": "likewise",
    "input_scaled_by_each_rank": "largest whole numbers often have the same power of two",
    "weight_scaled_by_each_rank": "likewise",
    "gradient_scaled_by_each_rank": "likewise, in the first layers of the backward",
    "scales_reduced_over_dp": "likewise",
    "input_scaled_as_the_micro_batch_before": "likewise",
    "parts_of_an_input_scaled_by_each_rank": "likewise",
    "scales_of_own_tokens_for_all": "likewise",
    "largest_values_of_another_gradient": "likewise",
    "one_linear_in_16_bits": "small whole numbers have few digits, in the forward",
    "partial_products_in_16_bits": "likewise",
    "zeros_divided_by_zero": "the mistake replaces the stand-in of scales",
    "scale_of_all_experts": "weights are few whole numbers, so that all have the same largest power of two",
    "outputs_scaled_together": "likewise",
    "weight_of_experts_scaled_by_each_rank": "likewise",
} | dict.fromkeys(
    (row.name for row in FINE_TUNING if row.model in (ADAPTED, ADAPTED_AND_DROPPING)),
    "no whole number holds alpha / rank, which is 5 / 3, so that it is refused",
)
ENOUGH, NAMED, EXPLAINED = 48, 0.95, 0.9


TURNS = 7
"""The quick run has every seventh mistake of each table, and those that the verifier is known to misname."""
OF_EXPERTS = (EXPERTS_OF_TOKENS, EXCHANGE_OF_TOKENS, EXPERT_GRADIENTS, ROUTER_LOSSES, FLOAT8_EXPERTS)
"""Of which the quick run has only those that are not `full`."""
QUICK = {row for table in TABLES for row in (table if table in OF_EXPERTS else table[::TURNS])} | {
    row for row in ROWS if row.missed
}


def marks_of(row):
    missed = pytest.mark.xfail(reason=row.missed, strict=True, raises=AssertionError)
    return [missed] * bool(row.missed) + [pytest.mark.full] * (row.full or row not in QUICK)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    "row", [pytest.param(row, id=f"{row.name}-{row.plan.world}", marks=marks_of(row)) for row in ROWS]
)
def test_verify_names_the_place_of_each_mistake(rank_pool, row):
    report = report_of(rank_pool, row.model, row.plan, row.defect, row.options)
    missed = row.named.missed_by(report)
    assert not missed, "\n".join([*missed, "", str(report)])
    assert row.named.explained_by(report) != bool(row.unexplained), report


def test_a_receive_buffer_that_is_sent_on_is_named(thread_ranks):
    row = SENT_ON
    case = case_of(row.model, row.plan, row.options)
    with row.defect():
        outcomes = thread_ranks.run(verify_rank, case, row.plan, ranks=row.plan.world)
    report = build_report(outcomes, row.plan, row.options)
    missed = row.named.missed_by(report)
    assert not missed, "\n".join([*missed, "", str(report)])
    assert row.named.explained_by(report), report


@pytest.mark.full
@pytest.mark.parametrize(
    "row", [row for row in SEEN_BY_EXACT if row.name not in UNSEEN_BY_EXACT], ids=lambda row: row.name
)
def test_exact_mode_also_names_the_mistake(rank_pool, row):
    report = report_of(rank_pool, row.model, row.plan, row.defect, EXACT)
    missed = row.named.missed_by(report)
    assert not missed, "\n".join([*missed, "", str(report)])


@pytest.mark.full
def test_scales_that_differ_are_refused_before_anything_is_compared(rank_pool):
    told = "rank 0: the loss scale = 32768.0; rank 1: the loss scale = 65536.0"
    with pytest.raises(CommunicationError, match=told):
        report_of(rank_pool, GPT2, HALF, scale_grows_on_one_rank, TWO_NATIVE_STEPS)


def test_a_model_that_draws_random_numbers_is_refused(rank_pool):
    """They are others in every run of the reference too, and would count as rounding."""
    with pytest.raises(ModelError, match="1 draws random numbers"):
        report_of(rank_pool, RANDOM, TWO_COPIES)


def test_most_mistakes_are_named_and_explained():
    assert len({row.defect for row in ROWS}) >= ENOUGH
    assert sum(not row.missed for row in ROWS) >= NAMED * len(ROWS)
    explained = [not row.unexplained for row in ROWS if row.named.cause]
    assert sum(explained) >= EXPLAINED * len(explained)


def test_no_mistake_is_listed_twice():
    assert len({(row.defect, row.plan.world, row.plan.compile) for row in ROWS}) == len(ROWS)
