"""The plan of a parallel run: a frozen value, equal on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from plait.errors import PlanError
from plait.plan.argument_checks import require_choice, require_flag, whole

Strategy = Literal["none", "optimizer", "gradients", "full"]
Reduce = Literal["last", "each"]
Recompute = Literal["none", "selective", "full"]
Precision = Literal["fp64", "fp32", "bf16", "fp16"]
Offload = Literal["none", "parameters", "full"]
SequenceParallel = Literal["none", "keep", "regather"]
ContextParallel = Literal["auto", "ring", "ulysses"]
Compile = Literal["graphs", "where possible"]
Linears = Literal["float8", "float8-rowwise", "float8-rowwise-gw", "mxfp8"]
ContextLayout = Literal["zigzag", "striped", "contiguous"]
Policy = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "auto"]

_CHOICES = {
    "schedule": Policy,
    "strategy": Strategy,
    "reduce": Reduce,
    "offload": Offload,
    "sequence_parallel": SequenceParallel,
    "context_parallel": ContextParallel,
    "context_layout": ContextLayout,
}
_PRECISIONS = ("precision", "master_precision", "gradient_precision", "reduce_precision")
_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The degrees of parallelism of a run, and the options of its steps.

    `dp` is the number of data-parallel ranks: `replicate` groups of `shard = dp / replicate` ranks each.
    `microbatches` is the number per data-parallel rank and step. `layers_per_stage` sets the number of layers
    of each stage, first stage first; without it a simulated step decides.

    `cp` ranks hold some positions of each sequence each (context parallelism); parameters and gradients are
    treated as with `cp` times as many data-parallel ranks. `context_layout`: which positions each rank holds:
    one chunk of 2 · cp from the start and one from the end (`zigzag`: equal work for causal attention), every
    cp-th position (`striped`), or consecutive ones. `context_parallel`: how attention sees the positions of
    other ranks: keys and values are sent to the ranks that need them (`ring`: Liu et al. 2023,
    arXiv:2310.01889), or each rank computes some heads for all positions (`ulysses`: Jacobs et al. 2023,
    arXiv:2309.14509); by default the one that sends fewer bytes.

    `ep` and `etp` divide the experts of mixture-of-experts layers, which see the ranks of `shard`, `cp` and
    `tp` in another way: as `edp` × `ep` × `etp`, row-major, `etp` innermost. `ep` ranks hold some experts
    each, `etp` ranks some inner features of each expert; `edp` = shard · cp · tp / (ep · etp) ranks hold the
    same, and a strategy shards the state of experts over them. Tokens travel to the ranks of their experts.

    `strategy`: the state sharded over the axes `shard` and `cp`: nothing, optimizer state, gradients too, or
    parameters too (the ZeRO paper's stages 0 to 3, arXiv:1910.02054, section 5). With `reduce` `each` the
    last two shard the gradients of every micro-batch at once: less memory, more bytes. The others keep whole
    gradients, and reduce them once.

    `precision` is the dtype of parameters and activations, by default the model's. `master_precision` is that
    of the parameters that the optimizer updates, by default fp32 where `precision` is bf16 or fp16, else the
    same as `precision`; `gradient_precision` is that of gradient accumulation, by default the master's,
    `reduce_precision` that of gradient reduction, by default that of accumulation. `offload`
    keeps on the CPU a rank's parameters except during a step, or also its gradients and optimizer state at
    all times (`full`).

    `recompute`: the operations that a layer's backward recomputes from its input: nothing, cheap operations
    (`selective`: all but matrix products and attention), or everything (`full`). A tuple has one entry for
    each layer of the model.

    `compile`: whether each distinct layer is compiled, forward and backward, when it first runs in training.
    True: with code by TorchInductor; "where possible": likewise, and layers that cannot be compiled run
    eagerly; "graphs": as graphs of PyTorch's own operations, without code generation. Weight gradients that
    are matrix products stay apart, for the schedule's `W` actions. A layer's forward must not depend on
    anything that changes between steps but its tensors, positions and documents.

    `cuda_graphs`: whether the work between two messages, gathers or reductions is recorded as CUDA graphs,
    which later steps replay; `parallelize` refuses it on CPUs. Whole parameters and gradients then stay
    allocated, whatever the `strategy`.

    `linears`: the number format in which linears multiply; None: that of `precision`. By torchao's recipes:
    `float8` has one scale a tensor, `float8-rowwise` one a row, a power of two, `float8-rowwise-gw` likewise
    with weight gradients in `precision`, and experts multiply so whatever the recipe. A scale comes from the
    largest value in a micro-batch's whole tensor, or in a row. Results, parameters, gradients and their sums
    over ranks keep their precisions, as do the linears of heads, routers and losses, and those with sizes
    that are no multiple of 16. `parallelize` refuses `mxfp8`, which is not implemented.

    `sequence_parallel` sets whether the operations outside of regions (norms, dropouts, residual connections)
    run on the whole sequence on every rank of `tp` (`none`), or on a part of the sequence on each, so that
    all activations are partitioned (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2). The gathered
    input of a region is then kept for weight gradients (`keep`), or gathered again (`regather`: less memory,
    two more all-gathers a transformer block, and two more, of gradients, where `W` does not follow `I` at
    once).

    `schedule` is the name of a policy, or `auto`: the shortest step in which no rank holds more than
    `memory_limit`, by default that of 1f1b. The unit of `memory_limit` is the activations of one micro-batch
    on one rank; a named policy that needs more is refused. `chunks` is the number of stages on each rank, by
    default the policy's own.

    `loss_scale` multiplies the loss, and final gradients are divided by it; by default fp16 has a dynamic
    scale, and other precisions have none.

    `loss_rows`: the most rows of logits (for a language model: tokens) that exist at once. The last layer
    then returns the input of its last linear, and `plait.cross_entropy` computes logits, loss and all
    gradients of the linear in chunks of that many rows, within `I`. None: all rows of a micro-batch at once.

    `overlap`: whether a stage's full backward computes input and weight gradients layer by layer, so that
    weight gradients overlap the reductions over `tp`; else all input gradients come first, so that the
    previous stage can continue. By default only stages without a waiting previous stage overlap.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    replicate: int = 1
    ep: int = 1
    etp: int = 1
    schedule: str = "1f1b"
    chunks: int | None = None
    microbatches: int = 1
    strategy: Strategy = "none"
    reduce: Reduce = "last"
    recompute: Recompute | tuple[Recompute, ...] = "none"
    compile: bool | Compile = False
    cuda_graphs: bool = False
    linears: Linears | None = None
    sequence_parallel: SequenceParallel = "none"
    context_parallel: ContextParallel = "auto"
    context_layout: ContextLayout = "zigzag"
    precision: Precision | None = None
    master_precision: Precision | None = None
    gradient_precision: Precision | None = None
    reduce_precision: Precision | None = None
    offload: Offload = "none"
    loss_scale: float | None = None
    memory_limit: float | None = None
    loss_rows: int | None = None
    overlap: bool | None = None
    layers_per_stage: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("pp", "dp", "cp", "tp", "replicate", "ep", "etp", "microbatches"):
            object.__setattr__(self, name, whole(f"plan.{name}", getattr(self, name), PlanError))
        for name in ("chunks", "loss_rows"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, whole(f"plan.{name}", getattr(self, name), PlanError))
        for name, kind in _CHOICES.items():
            require_choice(f"plan.{name}", getattr(self, name), get_args(kind), PlanError)
        self._require_recompute()
        self._require_compile()
        require_flag("plan.cuda_graphs", self.cuda_graphs, PlanError)
        for name in _PRECISIONS:
            if getattr(self, name) is not None:
                require_choice(f"plan.{name}", getattr(self, name), get_args(Precision), PlanError)
        self._require_masters()
        self._require_linears()
        for name in ("loss_scale", "memory_limit"):
            _require_positive(name, getattr(self, name))
        if self.offload != "none" and self.strategy == "none":
            raise PlanError(
                f"plan.offload is {self.offload!r}, but with plan.strategy 'none' nothing is sharded: "
                "choose the strategy full, gradients or optimizer."
            )
        if self.dp % self.replicate:
            raise PlanError(
                f"plan.replicate = {self.replicate} does not divide plan.dp = {self.dp}: "
                "choose a divisor, the shard axis is dp / replicate."
            )
        if self.edp * self.ep * self.etp != self.shard * self.cp * self.tp:
            raise PlanError(
                f"plan.ep · plan.etp = {self.ep} · {self.etp} does not divide shard · cp · tp = "
                f"{self.shard * self.cp * self.tp}, the ranks between which experts can be divided: choose "
                "divisors."
            )
        if not isinstance(self.overlap, bool | None):
            raise PlanError(f"plan.overlap is {self.overlap!r}: give True, False or None.")
        if self.layers_per_stage is not None:
            if not isinstance(self.layers_per_stage, tuple | list) or not self.layers_per_stage:
                raise PlanError(
                    f"plan.layers_per_stage is {self.layers_per_stage!r}: give one count per stage, or None."
                )
            counts = [whole("plan.layers_per_stage", count, PlanError) for count in self.layers_per_stage]
            # A list would make the plan unhashable, and unequal to one with a tuple.
            object.__setattr__(self, "layers_per_stage", tuple(counts))

    def _require_masters(self) -> None:
        """Set the default of `master_precision`; raise PlanError for masters narrower than they must be."""
        if self.master_precision is None and self.precision in ("bf16", "fp16"):
            # An update smaller than half a step between two 16-bit numbers would be rounded away.
            object.__setattr__(self, "master_precision", "fp32")
        master = self.master_precision
        if self.precision == "fp16" and master not in ("fp32", "fp64"):
            raise PlanError(
                f"plan.precision is 'fp16' and plan.master_precision is {master!r}: small "
                "steps of an optimizer are lost in half precision, so set plan.master_precision to 'fp32'."
            )
        if master is not None and self.precision is not None and _BYTES[master] < _BYTES[self.precision]:
            raise PlanError(
                f"plan.master_precision is {master!r}, narrower than plan.precision = {self.precision!r}, in "
                f"which the layers compute: give {self.precision!r} or leave plan.master_precision out."
            )

    def _require_linears(self) -> None:
        if self.linears is None:
            return
        require_choice("plan.linears", self.linears, get_args(Linears), PlanError, also="None, ")
        if self.precision == "fp16":
            raise PlanError(
                f"plan.linears is {self.linears!r} and plan.precision is 'fp16', whose loss scale makes "
                "gradients so large that float8 overflows too: set plan.precision to 'bf16' or 'fp32'."
            )
        if self.cuda_graphs:
            raise PlanError(
                f"plan.linears is {self.linears!r} and plan.cuda_graphs True, but the scales of weights are "
                "found once a step, and graphs repeat what a micro-batch has done: leave one of them out."
            )

    def _require_recompute(self) -> None:
        modes = self.recompute
        if isinstance(modes, tuple | list):
            # A list would make the plan unhashable, and unequal to one with a tuple.
            object.__setattr__(self, "recompute", tuple(modes))
            if not modes:
                raise PlanError(
                    "plan.recompute is (): give one mode for each layer of the model, or one for all."
                )
        for mode in modes if isinstance(modes, tuple | list) else (modes,):
            require_choice("plan.recompute", mode, get_args(Recompute), PlanError)

    def _require_compile(self) -> None:
        if not isinstance(self.compile, bool):
            require_choice("plan.compile", self.compile, get_args(Compile), PlanError, also="True, False, ")

    @property
    def shard(self) -> int:
        """The degree of the axis `shard`: `dp / replicate`."""
        return self.dp // self.replicate

    @property
    def edp(self) -> int:
        """The number of ranks of a replica that hold the same parts of experts."""
        return self.shard * self.cp * self.tp // (self.ep * self.etp)

    @property
    def divides_experts(self) -> bool:
        """Whether a rank holds some experts only, or parts of them."""
        return self.ep * self.etp > 1

    @property
    def state_ranks(self) -> int:
        """The number of ranks over which a strategy shards state: `shard` × `cp`."""
        return self.shard * self.cp

    @property
    def shards(self) -> bool:
        """Whether the optimizer updates shards of parameters, or offloaded copies."""
        return self.strategy != "none" and (self.state_ranks > 1 or self.offload != "none")

    @property
    def cuts_sequence(self) -> bool:
        """Whether sequence parallelism is on: layers may run on parts of the sequence."""
        return self.tp > 1 and self.sequence_parallel != "none"

    def weights_at_once(self, *, sends: bool) -> bool:
        """Return whether a full backward computes both gradients of a layer before those of the next layer.

        `sends`: whether another rank waits for the gradient of the stage's input.
        """
        return weights_at_once(self.overlap, sends=sends)

    @property
    def sends_inputs_first(self) -> bool:
        """Whether a backward that sends gradients computes all input gradients before weight gradients."""
        return self.pp > 1 and not self.weights_at_once(sends=True)

    @property
    def world(self) -> int:
        """The number of ranks: the product of the degrees."""
        return self.pp * self.dp * self.cp * self.tp


def weights_at_once(overlap: bool | None, *, sends: bool) -> bool:
    """Return whether a full backward computes both gradients of a layer before the next layer's.

    Else all input gradients come first. `overlap`: that of the plan; `sends`: whether another rank waits for
    the gradient of the stage's input.
    """
    return not sends if overlap is None else overlap


def _require_positive(name: str, value: object) -> None:
    if value is not None and not (
        isinstance(value, int | float) and value is not True and 0 < value < float("inf")
    ):
        raise PlanError(f"plan.{name} is {value!r}: give a number above 0, or None.")
