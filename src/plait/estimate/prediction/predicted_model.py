"""`PredictedModel`: interface of a model for predictions: sizes, work, memory; `DecoderModel`, from sizes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from plait.errors import PlanError
from plait.estimate.memory.decoder_memories import DecoderMemories
from plait.estimate.memory.plan_memories import PlanMemories
from plait.estimate.time.decoder_operations import MicrobatchShape
from plait.estimate.time.layer_work import MicrobatchSizes
from plait.estimate.time.whole_parameter_updates import StageOwners
from plait.pictures.quantities import count_text
from plait.plan.decoder_sizes import Decoder, LayerKind
from plait.plan.plan import Plan
from plait.schedules.search.stage_cuts import LayerCosts


class PredictedModel(ABC):
    """Interface of a model whose steps are predicted: its layers, their work, parameters and memory."""

    @property
    @abstractmethod
    def kinds(self) -> Sequence[LayerKind]:
        """The kind of each layer, first layer first; layers of the same kind do the same work."""

    @property
    @abstractmethod
    def layer_costs(self) -> Sequence[float]:
        """Multiplications per token of each layer, by which `parallelize` divides layers into stages."""

    @property
    @abstractmethod
    def context(self) -> int:
        """Tokens of a sequence; 1 where rows are no sequences of tokens."""

    @property
    @abstractmethod
    def operations_per_token(self) -> float:
        """Floating-point operations per token, forward and backward, without recomputation."""

    @property
    def experts(self) -> int:
        """The most experts of a layer, which plans can divide over `ep` and `etp`; 0 without any."""
        return 0

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Sentences on what predictions assume of a step, such as how tokens are routed."""
        return ()

    @abstractmethod
    def about(self) -> str:
        """Return the number of parameters and layers, and other sizes of the model, as text."""

    @abstractmethod
    def costs_for_cut(self, plan: Plan) -> LayerCosts:
        """Return the costs by which `parallelize` divides layers into stages, if none are measured."""

    @abstractmethod
    def check(self, plan: Plan) -> None:
        """Raise PlanError or ModelError where the model cannot be divided as the plan says."""

    @abstractmethod
    def undivided(self, plan: Plan) -> str | None:
        """Return in words why the model cannot be divided over the plan's tp, cp, ep and etp, or None."""

    @abstractmethod
    def sizes(self, plan: Plan, rows: float, *, on_cpu: bool) -> MicrobatchSizes:
        """Return sizes and operations of a micro-batch of `rows` sequences; `on_cpu`: layers run on CPUs."""

    def owners(self, plan: Plan, cut: Sequence[int]) -> Sequence[StageOwners]:
        """Return by stage the work of ranks that update whole parameters, as for Muon; empty without any.

        `cut`: how many layers each stage has.
        """
        return ()

    def mean_owner(self, plan: Plan) -> StageOwners | None:
        """Return a lower bound of the ranks' mean work to update whole parameters, as for Muon, or None.

        It holds for every cut into stages. None where there are none, or where it is not known.
        """
        return None

    @abstractmethod
    def memories(self) -> PlanMemories:
        """Return a `PlanMemories`, which predicts this model's memory under any plan."""


@dataclass(frozen=True)
class DecoderModel(PredictedModel):
    """A decoder-only transformer like plait's gpt2 and llama, for predictions; AdamW trains all of it."""

    decoder: Decoder

    def __post_init__(self) -> None:
        assert self.decoder.experts is None, "layers with experts are traced: see `TracedModel`"

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer, such as "attention" or "mlp", first layer first."""
        return self.decoder.kinds

    @property
    def layer_costs(self) -> tuple[float, ...]:
        """Multiplications per token of each layer."""
        return self.decoder.layer_costs

    @property
    def context(self) -> int:
        """Tokens of a sequence."""
        return self.decoder.context

    @property
    def operations_per_token(self) -> float:
        """Floating-point operations per token, forward and backward, without recomputation."""
        return self.decoder.operations_per_token

    def about(self) -> str:
        """Return the number of parameters and layers, and other sizes of the model, as text."""
        sizes = self.decoder
        return (
            f"{count_text(sizes.total_parameters)} parameters ({sizes.layers} layers, hidden "
            f"{sizes.hidden:,}, context {sizes.context:,})"
        )

    def costs_for_cut(self, plan: Plan) -> LayerCosts:
        """Return the costs by which `parallelize` divides layers into stages, if none are measured."""
        costs = LayerCosts.evenly(self.layer_costs)
        if plan.loss_rows is not None:
            costs = costs.in_input_gradient(-1, self.decoder.hidden * self.decoder.vocab)
        return costs.with_messages(plan.pp)

    def check(self, plan: Plan) -> None:
        """Raise PlanError where `tp` exceeds the heads, or `recompute` has another length than the layers."""
        heads, layers = self.decoder.heads, len(self.kinds)
        if plan.tp > heads:
            raise PlanError(f"plan.tp = {plan.tp} is more than model.heads = {heads}: lower plan.tp.")
        if isinstance(plan.recompute, tuple) and len(plan.recompute) != layers:
            raise PlanError(
                f"plan.recompute has {len(plan.recompute)} values, but the model has {layers} layers: "
                "give one value per layer, or one for all."
            )

    def undivided(self, plan: Plan) -> str | None:
        """Return in words why the sizes cannot be divided over the plan's `tp` and `cp` ranks, or None."""
        cp, undivided = plan.cp, self.decoder.undivided_by(plan.tp)
        if undivided is not None:
            return f"tp does not divide the {'width inside the MLP' if undivided == 'inner' else 'heads'}"
        return "2 · cp does not divide the context" if cp > 1 and self.context % (2 * cp) else None

    def sizes(self, plan: Plan, rows: float, *, on_cpu: bool) -> MicrobatchShape:
        """Return sizes and operations of a micro-batch of `rows` sequences; `on_cpu`: layers run on CPUs."""
        return MicrobatchShape(self.decoder, plan, rows, on_cpu)

    def memories(self) -> DecoderMemories:
        """Return a `DecoderMemories`, which predicts this model's memory under any plan."""
        return DecoderMemories(self.decoder)
