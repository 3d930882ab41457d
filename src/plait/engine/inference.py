"""Forwards without gradients: the model's output, and generated tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from plait.engine.fingerprint import fingerprint_of_tokens
from plait.engine.local_batch import joined, local_inputs, without_part
from plait.engine.runner import Runner
from plait.errors import DataError
from plait.models.layers.layer_sequence import evaluating
from plait.models.layers.shape_inference import TensorInfo
from plait.plan.axes import DENSE_ONLY
from plait.ranks.collectives import all_reduce, broadcast
from plait.tensor.autograd.paired_collectives import gather
from plait.tensor.microbatches import Microbatches, counted_microbatches, split_one
from plait.tensor.nested_values import Value, map_tensors, signatures, tensors_of, with_tensors
from plait.tensor.sampling import TokenChoice, next_token, padded, require_prompt


def model_output(runner: Runner, inputs: Value, *, whole: bool, everywhere: bool) -> Value | None:
    """Return the last stage's output for this data-parallel rank's `inputs`, without gradients."""
    (inputs,), length, described = without_part(runner.runtime.context_parallelism, inputs)
    given_cut = isinstance(inputs, Microbatches)
    inputs, _, counted = counted_microbatches(inputs, inputs, runner.plan.microbatches, None)
    batch = split_one(inputs, "inputs", runner.plan.microbatches, runner.as_input)
    call = f"an output, whole {whole}, everywhere {everywhere},"
    runner.require_same_batch(call, signatures(batch), fingerprint_of_tokens(batch), described)
    with torch.no_grad(), evaluating(runner.modules):
        local = local_inputs(batch, runner.runtime.context_parallelism, length)
        runner.run(runner.steps.output, local)
        if not given_cut:
            _require_rows(runner, batch)
        outputs = runner.pipeline.loss_stage.take_outputs()
        if everywhere:
            outputs = list(_broadcast(runner, outputs))
        pairs = zip(outputs[:counted], local.sequences, strict=False)  # none on ranks before the last stage's
        outputs = [joined(output, sequence) for output, sequence in pairs]
        vocabulary = runner.runtime.vocabulary
        if whole and vocabulary is not None:
            parts = map(vocabulary.require_vocabulary_shard, outputs)
            outputs = [gather(one, vocabulary.group, -1, vocabulary.classes) for one in parts]
        if not outputs:
            return None
        return Microbatches(outputs) if given_cut else _concatenated(outputs)


def _require_rows(runner: Runner, batch: Sequence[Value]) -> None:
    """Raise DataError, on every rank, unless the micro-batches' outputs can be concatenated along dim 0."""
    for part, info in zip(batch, runner.pipeline.output_infos, strict=True):
        rows = next(tensors_of(part)).shape[0]
        unlike = [list(one.shape) for one in info.tensors if one.shape[:1] != (rows,)]
        if unlike and len(batch) > 1:
            raise DataError(
                f"the model gives a tensor of shape {unlike[0]} for a micro-batch of {rows} rows, so the "
                f"outputs of {len(batch)} micro-batches cannot be joined along dim 0: give the inputs as "
                "Microbatches, and each one's output comes by itself."
            )


def _broadcast(runner: Runner, outputs: Sequence[Value]) -> Iterator[Value]:
    """Broadcast the last stage's `outputs` to every rank of `pp`, and yield them; other ranks pass none."""
    group, source = runner.mesh.group("pp"), runner.steps.schedule.rank_of[-1]
    given = iter(outputs)
    for info in runner.pipeline.output_infos:
        value = next(given) if runner.is_last else info.rebuild(partial(_empty, runner))
        yield map_tensors(
            lambda tensor: broadcast(tensor, group, source, checked=False).about("the output").wait(), value
        )


def _empty(runner: Runner, info: TensorInfo) -> Tensor:
    """Return an empty tensor for the model's output, given its `info`; the loss may compute the logits."""
    shape, classes = info.shape, runner.runtime.blueprint.output_classes
    if classes is not None:
        vocabulary = runner.runtime.vocabulary
        shape = (*shape[:-1], classes if vocabulary is None else len(vocabulary.own))
    return torch.empty(shape, dtype=info.dtype, device=runner.mesh.device)


def _concatenated(outputs: Sequence[Value]) -> Value:
    """Return the outputs of all micro-batches as one value whose tensors are concatenated along dim 0."""
    if len(outputs) == 1:
        return outputs[0]
    columns = zip(*map(tensors_of, outputs), strict=True)
    return with_tensors(outputs[0], (torch.cat(column) for column in columns))


def generated(runner: Runner, prompt: Tensor, tokens: int, choice: TokenChoice) -> Tensor:
    """Return `prompt` `[rows, length]` and up to `tokens` generated tokens: fewer where all rows stop."""
    require_prompt(prompt, tokens, choice)
    start = f"a prompt {tuple(prompt.shape)} of tokens {fingerprint_of_tokens(prompt.cpu())}"
    runner.require_same_call(f"{start}, {tokens} more, {choice}", "model")
    generator = torch.Generator().manual_seed(choice.seed)
    sequence, programs = prompt.to(runner.mesh.device), runner.steps.output_of_one
    with torch.no_grad(), evaluating(runner.modules):
        for number in range(tokens):
            seen, length = padded(sequence, runner.runtime.context)
            local = local_inputs([seen], runner.runtime.context_parallelism)
            runner.run(programs, local, parameters_changed=number == 0)
            token = torch.zeros(sequence.shape[0], dtype=torch.int64, device=runner.mesh.device)
            for logits in runner.pipeline.loss_stage.take_outputs():  # one, on the last stage's ranks
                token = next_token(
                    joined(logits, local.sequences[0])[:, length - 1],
                    choice,
                    generator,
                    vocabulary=runner.runtime.vocabulary,
                )
            broadcast(token, runner.mesh.group("pp"), runner.steps.schedule.rank_of[-1], checked=False).wait()
            if choice.stop:
                token, ended = choice.stopped(token, sequence[:, prompt.shape[1] :])
            sequence = torch.cat([sequence, token[:, None]], dim=1)
            if choice.stop and _all_ended(runner, ended):
                break
    return sequence


def _all_ended(runner: Runner, ended: bool) -> bool:
    """Return whether this rank's rows have ended, and those of ranks whose parameters or experts it uses.

    Communication: 4 bytes over the axes of its shards, or over those of experts, on the CPU where the group
    has a transport for it; none where nothing is sharded.
    """
    kinds = runner.runtime.blueprint.kinds.values()
    axes = {axis for kind in kinds for axis in kind.sharded_over}
    if runner.plan.divides_experts:
        axes = set(DENSE_ONLY)  # the same ranks as those of `edp`, `ep` and `etp`
    if not axes or (group := runner.mesh.group(axes)).size == 1:
        return ended
    going_on = torch.tensor(float(not ended), device=group.device_for_text(runner.mesh.device))
    return not all_reduce(going_on, group, "max", checked=False).about("rows that go on").wait()
