"""`Engine`: the model that `parallelize` returns, with methods for steps, parameters, output and state."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, cast

import torch
from torch import Tensor, nn

from plait.engine.action_times import ActionTimes
from plait.engine.build_router_balance import require_counts
from plait.engine.fingerprint import fingerprint_of_order
from plait.engine.given_routing import given_experts
from plait.engine.inference import generated, model_output
from plait.engine.optimizer_consistency_check import StepAgreement
from plait.engine.runner import InstructionObserver, Runner, Runtime
from plait.engine.sharding.gradient_norm import scale_to, start_norm
from plait.engine.sharding.replica_check import check_replicas
from plait.engine.step_recorder import Recording
from plait.engine.whole_state_dict import load_state_dict, named_gradients, state_dict
from plait.errors import NonFiniteError, PlanError, ReplicaError, ScheduleError
from plait.models.layers.layer_sequence import evaluating
from plait.plan.argument_checks import require_number
from plait.plan.layout.layout import Layout
from plait.plan.shard_plan import ShardPlan
from plait.proof.optimizer_proof import OptimizerGuard, Partitioning
from plait.ranks.group import Counts
from plait.ranks.text_collectives import broadcast_result
from plait.schedules.action import Action
from plait.schedules.check import check
from plait.schedules.costs import Costs, is_within
from plait.schedules.schedule import Schedule
from plait.schedules.search.schedule_by_policy import AUTO, schedule
from plait.schedules.timed_schedule import simulated
from plait.tensor.experts.router_losses_of_step import ExpertLoad
from plait.tensor.nested_values import Value
from plait.tensor.sampling import TokenChoice, stop_tokens

if TYPE_CHECKING:
    from plait.checkpoint.dtensor import DTensor


class _Retired:
    """Placeholder for an engine's parts after `plait.reshard` took them: every use raises PlanError."""

    def __getattr__(self, name: str) -> NoReturn:
        raise PlanError(
            "this engine was resharded, and its parameters are elsewhere: use the engine that plait.reshard "
            "returned."
        )


class StepWatch(Protocol):
    """Protocol of an object that an engine calls at fixed points of each training step."""

    def begin_pass(self, runner: Runner) -> None:
        """Called when `forward_backward` begins."""

    def end_pass(self, runner: Runner) -> None:
        """Called at the end of `forward_backward`, when gradients are final."""

    def before_clipping(self) -> None:
        """Called when the gradient norm is known, before gradients are scaled."""

    def compare(self) -> None:
        """Called before the run's state is saved."""

    def close(self) -> None:
        """Called when another engine takes this one's place."""


class Engine:
    """A model parallelized over a mesh, made by `parallelize`; every rank of the mesh calls every method."""

    def __init__(self, runtime: Runtime, originals: Iterable[nn.Parameter] = ()) -> None:
        """Make the engine of one rank; `originals`: parameters of the user's model, which it has copied."""
        self.blueprint, self.plan = runtime.blueprint, runtime.blueprint.plan
        self.mesh, self.runtime = runtime.mesh, runtime
        self._runner = Runner(runtime)
        self._agreement = StepAgreement(runtime, self._runner.scale)
        self._guard = OptimizerGuard(
            self.parameters(),
            Partitioning.of(self.plan, self.blueprint.kinds.values()),
            self._before_step,
            originals,
        )
        self._traffic_before = self.mesh.traffic.snapshot()
        self.watches: list[StepWatch] = []
        """What is called in each training step."""

    def retire(self) -> None:
        """Run no more steps, since another engine takes its place: every later call raises PlanError."""
        for watch in [*self.watches]:
            watch.close()
        self.runtime, self._runner = cast(Runtime, _Retired()), cast(Runner, _Retired())

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that `optimizer` is about to step, and correct the biases of routers."""
        self._agreement.note_optimizer(optimizer)
        if self.runtime.balance is not None:
            self.runtime.balance.correct()

    def forward_backward(
        self,
        inputs: Value,
        targets: Value,
        *,
        input_gradients: bool = False,
        routing: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Run a step's forward and backward with all gradient reductions, and return the mean loss, 0-d.

        `inputs` and `targets` are this data-parallel rank's share of the global batch (ranks that differ in
        pp or tp pass the same): tensors, tuples or dictionaries whose dim 0 is the batch, cut into
        `plan.microbatches` micro-batches; or both as `Microbatches`, cut already and each of its own
        shapes. Returns the mean loss over the global batch, equal on every rank; NaN, as PyTorch has it,
        where no target of it counts (`fit` refuses such a batch). Gradients add to existing ones, and are
        then equal on all ranks that hold them; an exception leaves them as they were. `routing`: the experts
        to which tokens go, int64 `[rows, length, k]` of whole sequences by path of the router, as in a replay
        of what another engine has chosen; weights are computed from the scores as always.
        Communication: the batch's shapes and hash (256 bytes) over `pp`, `cp` and `tp`, boundary tensors
        over `pp`, attention over `cp`, what regions and the loss sum over `tp`, the loss's weight over
        `dp_cp`, with dropout the number of rows over `dp`, one reduction per unit, the loss over `world`; in
        the first call, the second, the fourth …: settings (256 bytes) over `world`, `dp_cp` and `tp`.
        """
        runner = self._runner
        self.runtime.late_hooks.warn()
        self._traffic_before = self.mesh.traffic.snapshot()
        self._agreement.note_gradients()
        options = {"input_gradients": input_gradients, "routing": "given" if routing else "chosen"}
        self._agreement.compare_at("forward_backward", **options)
        for watch in self.watches:
            watch.begin_pass(runner)
        runner.scale.require_checked(anew=runner.reducer.starts_anew)
        with torch.enable_grad():
            batch = runner.loss_batch(inputs, targets, input_gradients=input_gradients)
            scale = runner.scale.value / batch.divisor
            runner.begin_balance(batch)
            step = runner.steps.train, batch.inputs, batch.targets, scale
            with given_experts(runner, routing, batch):
                runner.run(*step, input_gradients=input_gradients)
            loss = runner.mean_loss(batch)
        runner.scale.end()
        for watch in self.watches:
            watch.end_pass(runner)
        self.passes += 1
        return loss

    def evaluate(self, inputs: Value, targets: Value, *, rows: int | None = None) -> Tensor:
        """Return the mean loss over the global batch, without gradients and with layers in evaluation mode.

        Takes and returns what `forward_backward` does, and any number of rows, also unlike ones on the ranks.
        `rows`: how many count, from the first on; None: all. A rank without any gives one, and `rows = 0`.
        """
        runner = self._runner
        with torch.no_grad(), evaluating(runner.modules):
            batch = runner.loss_batch(inputs, targets, rows)
            runner.run(runner.steps.evaluate, batch.inputs, batch.targets)
            return runner.mean_loss(batch)

    def output(self, inputs: Value, *, whole: bool = True, everywhere: bool = True) -> Value | None:
        """Return the last stage's output for this data-parallel rank's `inputs`, without gradients.

        Layers run in evaluation mode. `inputs` are as for `evaluate`, and dim 0 of the output's
        tensors is that of the inputs; `Microbatches` give `Microbatches`. With `whole` logits that are cut by
        vocabulary over `tp` are gathered; without, each rank has those of its own classes. With `everywhere`
        every rank gets the output; without, only those of the last stage do, and the others get None.
        Communication: the batch's shapes (256 bytes) over `pp`, and tokens over `cp` and `tp`, boundary
        tensors over `pp`, attention over `cp`, regions over `tp`, and one all-gather of the output over `cp`;
        with `everywhere` one broadcast of each tensor over `pp`, with `whole` one all-gather of cut logits
        over `tp`. Raises DataError where outputs of micro-batches cannot be joined.
        """
        return model_output(self._runner, inputs, whole=whole, everywhere=everywhere)

    def generate(
        self,
        prompt: Tensor,
        tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int = 0,
        stop: int | Sequence[int] = (),
    ) -> Tensor:
        """Extend `prompt` `[rows, length]` to int64 `[rows, length + tokens]`, equal on all ranks of a model.

        A row ends at a token of `stop`, which fills it; the result may then be shorter, and the host waits.
        The model must be causal, its output logits `[rows, length, vocab]`; its input is cut to the context.
        Communication: per token the boundaries and the token over `pp`, attention and logits over `cp`,
        regions and 16 bytes a row over `tp` (with `top_k` 8 · k more), with `stop` 4 bytes over `shard`.
        """
        choice = TokenChoice(temperature, top_k, seed, stop_tokens(stop))
        return generated(self._runner, prompt, tokens, choice)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale all gradients of the model to a norm of at most `max_norm`; return the norm before, 0-d.

        The norm is over all axes, each parameter once; `norm_type` is the exponent, or `float("inf")`.
        A norm that is not finite changes nothing; with `error_if_nonfinite` it raises `NonFiniteError` on
        every rank. With a loss scale gradients that are not finite are dropped, so that the optimizer's
        next step does nothing, and a dynamic scale is halved; only then, or for the error, the host waits for
        the device. Communication: one all-reduce of 8 bytes over `model`, or over `world` where gradients are
        cut.
        """
        self._agreement.compare_at("clip_grad_norm_", max_norm=max_norm, norm_type=norm_type)
        units, scale = self.runtime.units.values(), self._runner.scale
        group = self.mesh.group(self.blueprint.norm_axis)
        norm = start_norm(units, self.runtime.counted, group, self.mesh.device, norm_type)()
        for watch in self.watches:
            watch.before_clipping()
        scale_to(units, norm, max_norm)
        if scale.guards or error_if_nonfinite:
            finite = bool(norm.isfinite())
            scale.update(finite=finite)
            if not finite and scale.guards:
                self._runner.drop_gradients()
            if not finite and error_if_nonfinite:
                raise NonFiniteError(
                    f"the gradient norm is {norm.item()} over all ranks: lower the learning rate, raise the "
                    "warm-up, or look at the data of that step."
                )
        return norm

    def step(self, optimizer: torch.optim.Optimizer, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients, call `optimizer.step()`, and return the gradient norm before clipping, 0-d.

        `clip_grad_norm_` and `optimizer.step()` in one call, without a barrier: a rank sums its own gradients
        as soon as they are final, and waits only for the sum over ranks; on a GPU the host waits only with
        a loss scale or offloaded gradients. Returns the norm before clipping; `float("inf")` clips nothing.
        Communication: as `clip_grad_norm_`.
        """
        self.check_optimizer(optimizer)
        self._agreement.note_optimizer(optimizer, 0)
        norm = self.clip_grad_norm_(max_norm, norm_type)
        graphs, times = self._runner.graphs, self._runner.action_times
        update = optimizer.step if graphs is None else partial(graphs.step, optimizer)
        if times is None:
            update()
        else:
            times.measure_optimizer(update)
        return norm

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over this rank's parameters with their names in the model, layer by layer.

        They have the attributes of the model's. Hooks on their gradients are refused in the next step.
        """
        return self.runtime.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield this rank's parameters, those that its optimizer updates."""
        for _, parameter in self.named_parameters():
            yield parameter

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over this rank's buffers that are in the model's `state_dict`, with their names there."""
        return self.runtime.named_buffers()

    def state_dict(self, *, everywhere: bool = False) -> dict[str, Tensor]:
        """Return the whole model with the names of `model.state_dict()`: parameters and buffers, on the CPU.

        On rank 0, and an empty one on the others; with `everywhere` on every rank. Parameters have the dtype
        that the optimizer updates. Memory: the result, and one tensor.
        Communication: for each tensor an all-gather over each of `shard`, `cp` and `tp` where it is cut, and
        a broadcast over `pp`; once the names of a stage's tensors over `pp`.
        """
        return state_dict(self.runtime, everywhere=everywhere)

    def load_state_dict(self, state: Mapping[str, Any] | None, *, broadcast: bool = False) -> None:
        """Load whole parameters and buffers, by the names of `model.state_dict()`, into all ranks' shards.

        Every rank passes the same ones; with `broadcast` rank 0's are used, and the others may pass None.
        Slices of safetensors files work, too. The optimizer's state does not change. ModelError on every
        rank, before anything changes, for names or shapes that do not fit. Communication: a hash (256 bytes)
        over `world`; with `broadcast` every tensor over `world`, one by one.
        """
        load_state_dict(self.runtime, state, from_rank_zero=broadcast)

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole gradient of each parameter that has one, by name, on every rank's device.

        For use between `forward_backward` and `zero_grad`. All ranks must iterate over all of them.
        Memory and communication: as `state_dict(everywhere=True)`.
        """
        return named_gradients(self.runtime)

    def named_dtensors(self) -> Iterator[tuple[str, DTensor]]:
        """Yield this rank's parameters as `DTensor`s, without gradients, one after another.

        Each is a `DTensor` over the axes `replicate`, `shard`, `cp`, `tp` of this rank's stage that have more
        than one rank. It shares the parameter's memory, unless a `DTensor` cannot describe this rank's shard:
        then the shards are gathered, all ranks of the stage take part, and it is a copy (see `as_dtensor`).
        So all of them must iterate over all names. Communication: one all-gather, over `shard`, `cp` or `tp`,
        for each axis of a parameter that is gathered.
        """
        from plait.checkpoint.dtensor import as_dtensor  # loads 500 modules

        for name, shard in self.named_parameters():
            yield name, as_dtensor(shard, self.layouts[name], self.mesh)

    def parameter_groups(self, weight_decay: float | None = None) -> list[dict[str, Any]]:
        """Return two parameter groups: matrices with `weight_decay`, and all others without any."""
        if weight_decay is not None:
            require_number("weight_decay", weight_decay, PlanError)
        trainable: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                trainable[len(self.layouts[name].shape) >= 2].append(parameter)
        self._agreement.decays.add(weight_decay)
        decay = {} if weight_decay is None else {"weight_decay": weight_decay}
        return [{"params": trainable[True], **decay}, {"params": trainable[False], "weight_decay": 0.0}]

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise `PlanError` where an update of `optimizer` depends on parameters that another rank holds.

        Also where it would update the model that was given, of whose parameters the engine has copies.
        Under `pp` the update of a parameter may depend on that parameter only; where parameters are cut
        (`tp`, or a strategy that shards them) the update of an element on that element only. An optimizer is
        also checked before its first step. No communication.
        """
        self._guard.check(optimizer)

    def check_replicas(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Raise `ReplicaError` on every rank if the replicas of a parameter differ in any bit.

        Gradients count too, with an `optimizer` its options and its state, and how ranks have clipped and
        accumulated. Communication: 8 bytes a parameter of the model over `dp_cp`, `tp` and (if some are tied
        across stages) `pp`, 2 bytes a parameter over `world`, settings as in `forward_backward`.
        """
        if optimizer is not None:
            self._agreement.note_optimizer(optimizer, 0)
        self._agreement.compare("check_replicas", ReplicaError)
        parameters = dict(self.named_parameters())
        check_replicas(parameters, self.layouts, self.blueprint.owners, self.mesh, optimizer)

    def compare_memory(self) -> None:
        """Raise CorruptionError where memory has changed by itself; only within `plait.CorruptionChecks`.

        For use before a checkpoint is saved. No communication; on a GPU the host waits.
        """
        for watch in self.watches:
            watch.compare()

    def microbatch_losses(self) -> Tensor:
        """Return the mean loss of each micro-batch of this data-parallel rank's last step, `[microbatches]`.

        Communication: one all-reduce over `cp`, one broadcast over `pp`.
        """
        return self._runner.microbatch_losses()

    def loss_weight(self) -> Tensor:
        """Return the weight of the last global batch's loss, 0-d: for cross-entropy its counted targets."""
        return self._runner.loss_weights()[1]

    @property
    def expert_load(self) -> ExpertLoad | None:
        """Router losses, tokens per expert and rows sent by ranks in the last step; None without routers.

        Over the whole step and all ranks, equal on each.
        """
        balance = self.runtime.balance
        return None if balance is None else balance.load

    @property
    def forces_routing(self) -> bool:
        """Whether training steps send tokens to experts in turn, for timings: see `balance_experts`."""
        balance = self.runtime.balance
        return balance is not None and balance.settings.forced_routing

    @property
    def averages_loss(self) -> bool:
        """Whether the loss of a batch is a mean over it; False for losses with reduction "sum"."""
        return not getattr(self.runtime.loss, "sums", False)

    def non_finite(self) -> Tensor:
        """Return whether this rank's losses and gradients of the last step are not finite: bool `[2]`."""
        return self._runner.non_finite()

    def input_gradients(self) -> Value | None:
        """Return the gradients of the last step's inputs, of whole sequences, nested like them.

        None for integer tensors; None if not computed, and on ranks of other stages than the first.
        Communication: under context parallelism one all-gather of each micro-batch's tensors over `cp`.
        """
        return self._runner.input_gradients()

    def observe(self, observer: InstructionObserver | None) -> None:
        """Call `observer(instruction, runtime)` after each instruction of later steps; None removes it."""
        self._runner.observe(observer)

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """Context manager that records when this rank's forwards and backwards run; keeps the last step.

        Yields a recording of the timeline and the measured costs, valid also afterwards. All ranks enter it.
        Contexts may overlap. It takes a few microseconds an action, and on a GPU waits before a step.
        """
        recording = Recording(self.mesh, lambda: self.schedule)
        self._runner.recorders.append(recording.recorder)
        try:
            yield recording
        finally:
            self._runner.recorders.remove(recording.recorder)

    def time_actions(self) -> ActionTimes:
        """Start to measure how long this rank computes in each training step; return the `ActionTimes`.

        See `ActionTimes`: it takes a microsecond an action, and no synchronisation.
        """
        return self._runner.time_actions()

    @property
    def schedule(self) -> Schedule:
        """The order of actions in a training step, and the `pp` rank of each stage."""
        return self._runner.steps.schedule

    def follow(self, order: Schedule) -> None:
        """Set the schedule of later steps: the same actions on the same ranks, in another `order`.

        Parameters, their gradients and the optimizer's state stay where they are, and gradients have the same
        bits (except those of a parameter with users on two stages of one rank). All ranks pass the same
        order: `plait train` keeps its own in RUN/schedule.json. Raises ScheduleError for other actions.
        """
        require_same_actions(order, self.schedule)
        if self.runtime.balance is not None:
            require_counts(self.runtime.balance.settings, order)
        self._runner.require_same_call(f"follow {fingerprint_of_order(order)}", "world")
        self._runner.steps = replace(self._runner.steps, schedule=order)

    def reorder(self, costs: Costs, memory_limit: float | None = None) -> Schedule:
        """Search for a schedule with shorter steps at these `costs` (of a `recording`); set and return it.

        Only rank 0's `costs` are used. `memory_limit` is by default that of the plan. Where nothing shorter
        is found the order does not change. Returns the order of later steps. All ranks call it and wait for
        rank 0, a few seconds at most. Communication: the order as text over `world`.
        """
        now = self.schedule
        limit = self.plan.memory_limit if memory_limit is None else memory_limit
        text = broadcast_result(
            lambda: json.dumps(to_json(shortest_schedule(now, costs, limit))),
            ScheduleError,
            self.mesh.group("world"),
            self.mesh.device,
        )
        self.follow(from_json(json.loads(text), now) or now)
        return self.schedule

    @property
    def shard_plan(self) -> ShardPlan:
        """Which parameter shards and buffers each rank holds; the further names of shared parameters."""
        return self.blueprint.shard_plan

    @property
    def buffer_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of all buffers in the model's `state_dict`, by name."""
        return self.shard_plan.buffer_shapes

    @property
    def aliases(self) -> Mapping[str, str]:
        """Mapping from further names of shared parameters in the `state_dict` to their engine names."""
        return self.shard_plan.aliases

    @property
    def tied(self) -> Mapping[str, tuple[int, ...]]:
        """Mapping from each parameter that several ranks of `pp` hold (a tied one) to those ranks."""
        return {name: ranks for name, ranks in self.blueprint.owners.items() if len(ranks) > 1}

    @property
    def run_state(self) -> dict[str, Any]:
        """State to save for resuming a run, besides parameters and optimizer state, as JSON values.

        The number of steps, the loss scale, the order of actions; the choices of experts in the last step,
        where those of the next count them. Set it, on all ranks, to continue another run; an order of other
        stages or micro-batches is ignored, and there may be none.
        """
        scale = self._runner.scale
        adapted = {"value": scale.value, "good_steps": scale.good_steps} if scale.dynamic else None
        state = {"passes": self.passes, "loss_scale": adapted, "order": to_json(self.schedule)}
        balance = self.runtime.balance
        return state if balance is None else state | {"expert_tokens": balance.counts_for_next_step()}

    @run_state.setter
    def run_state(self, state: Mapping[str, Any]) -> None:
        self.passes = state["passes"]
        if self.adapts_loss_scale and state["loss_scale"] is not None:
            self._runner.scale.value = state["loss_scale"]["value"]
            self._runner.scale.good_steps = state["loss_scale"]["good_steps"]
        if self.runtime.balance is not None:
            self.runtime.balance.load_counts(state.get("expert_tokens", {}))
        order = from_json(state["order"], self.schedule) if "order" in state else None
        if order is not None:
            self.follow(order)

    @property
    def passes(self) -> int:
        """The number of calls of `forward_backward`, on which dropout masks depend.

        Set it, on all ranks, to continue another run.
        """
        return self.runtime.dropout.step

    @passes.setter
    def passes(self, count: int) -> None:
        self.runtime.dropout.step = count

    @property
    def loss_scale(self) -> float:
        """The factor by which the next step multiplies the loss; 1 without loss scaling."""
        return self._runner.scale.value

    @property
    def adapts_loss_scale(self) -> bool:
        """Whether the loss scale is dynamic: gradients that overflow halve it for the next step."""
        return self._runner.scale.dynamic

    @property
    def layouts(self) -> Mapping[str, Layout]:
        """Mapping from every parameter of the model, by name, to the layout of its shards on the ranks."""
        return self.blueprint.layouts

    @property
    def linear_formats(self) -> Mapping[str, str]:
        """By the path of each linear: the float8 recipe by which it multiplies, or why it stays in 16 bits.

        Likewise of experts. Empty without `Plan.linears`. The reasons: `head`, `adapter`, `tied` weight,
        `hooks`, `sizes` that are no multiple of 16, or the rule by which `tp` leaves the linear whole.
        """
        return self.blueprint.float8.formats(self.plan.linears or "")

    def traffic(self) -> Counts:
        """Return this rank's communication since the last `forward_backward` began, `{axis: {kind: Count}}`.

        A `Count` has the bytes and the number of calls.
        """
        return self.mesh.traffic.since(self._traffic_before)


def require_same_actions(other: Schedule, now: Schedule) -> None:
    """Raise ScheduleError unless `other` is valid and has the micro-batches and stages of `now`."""
    for name in ("ranks", "rank_of", "microbatches"):
        expected, found = getattr(now, name), getattr(other, name)
        if expected != found:
            raise ScheduleError(
                f"the schedule's {name} is {found}, but the engine's is {expected}: stages stay where they "
                "are, so give another order of the same actions."
            )
    check(other)


def shortest_schedule(now: Schedule, costs: Costs, limit: float | None) -> Schedule:
    """Return a schedule shorter than `now` at these `costs`, with the same stages on each rank, else `now`.

    `limit` is that of `plait.schedule`; `now` is not returned if it exceeds it. Raises ScheduleError where no
    schedule is within it.
    """
    found = schedule(
        AUTO, ranks=now.ranks, microbatches=now.microbatches, costs=costs, limit=limit, rank_of=now.rank_of
    )
    fits = limit is None or is_within(now, limit, costs.memory(now.ranks, now.stages))
    # As the executor runs them: a `B` whose gradient is sent is an `I` and then a `W`.
    before, after = (simulated(one.split_backward, costs).makespan for one in (now, found))
    return now if fits and before <= after else found


def to_json(order: Schedule) -> dict[str, Any]:
    """Return a schedule as JSON values: policy, actions of each rank, micro-batches, rank of each stage."""
    lines = [order.policy, *(" ".join(row) for row in order.order)]
    return {"microbatches": order.microbatches, "rank_of": list(order.rank_of), "order": "\n".join(lines)}


def from_json(state: Mapping[str, Any], now: Schedule) -> Schedule | None:
    """Return the schedule that `to_json` wrote; None if it equals `now` or is for another pipeline.

    Another pipeline has another number of micro-batches, or a stage on another rank.
    """
    if (state["microbatches"], tuple(state["rank_of"])) != (now.microbatches, tuple(now.rank_of)):
        return None
    policy, *rows = state["order"].split("\n")
    actions = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    return None if actions == now.actions else replace(now, policy=policy, actions=actions, bound=None)
