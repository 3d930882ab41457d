"""The sections `data`, `parallel` and `run` of the configuration, and the base class of sections."""

from __future__ import annotations

import re
from math import inf
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from plait.app.data.recorded_tokenizer import recorded_tokenizer
from plait.errors import ConfigError
from plait.plan.plan import (
    Compile,
    ContextLayout,
    ContextParallel,
    Linears,
    Offload,
    Policy,
    Recompute,
    Reduce,
    SequenceParallel,
    Strategy,
)

Count = Annotated[int, Field(ge=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]


def _is_positive(text: str) -> bool:
    """Return whether `text` spells a finite number above 0."""
    try:
        return 0 < float(text) < inf
    except ValueError:
        return False


class Section(BaseModel):
    """Base class of the sections: frozen, rejects unknown fields. The text below a field is its help."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class DataConfig(Section):
    """The training data."""

    source: str = Field(default="stdlib", min_length=1)
    """stdlib (the source of Python's standard library), random (uniform tokens from the seed), a text file, a
    folder, a glob, token arrays (.bin, .npy), a folder of `plait data prepare`, conversations (.jsonl or
    .parquet with messages, or prompt and completion), texts (likewise, with text), or a data set of Hugging
    Face (hf://OWNER/NAME:SPLIT)"""
    tokenizer: str | None = Field(default=None, min_length=1)
    """bytes, or the path of a tokenizer.json or its folder; none: that of a prepared corpus, else that in the
    model's folder, else bytes"""
    mixture: tuple[str, ...] = ()
    """in place of source: sources, each as SOURCE=WEIGHT, whose sequences are mixed by weight"""
    validation_source: str | dict[str, str] = ""
    """a source for validation, in place of a fraction of the corpus; or a table of several, each with a
    name"""
    dtype: Literal["uint16", "uint32"] = "uint16"
    """type of the tokens in a .bin array"""
    validation: Decay = 0.05
    """fraction of the corpus kept for validation; 0: none"""

    @property
    def sources(self) -> dict[str, float]:
        """The sources and the weight of each."""
        parts = (one.rpartition("=") for one in self.mixture)
        return {source: float(weight) for source, _, weight in parts} or {self.source: 1.0}

    @property
    def validation_sources(self) -> dict[str, str]:
        """The sources for validation by name; a single one without a name is called ""."""
        given = self.validation_source
        return given if isinstance(given, dict) else {"": given} if given else {}

    @property
    def known_tokenizer(self) -> str | None:
        """The field `tokenizer`, else that recorded in the first prepared source; None without either."""
        return self.tokenizer or next(filter(None, map(recorded_tokenizer, self.sources)), None)

    @field_validator("validation_source")
    @classmethod
    def _named(cls, given: str | dict[str, str]) -> str | dict[str, str]:
        for name, source in given.items() if isinstance(given, dict) else ():
            if re.fullmatch(r"[\w.@/-]+", name) is None or not source:
                raise ConfigError(
                    f"data.validation_source has {name!r} = {source!r}: give a name of letters, digits, "
                    "dots, dashes and underscores, and a source."
                )
        return given or ""

    @model_validator(mode="after")
    def _of_one_source(self) -> DataConfig:
        if self.mixture and self.source != type(self).model_fields["source"].default:
            raise ConfigError(
                f"data.source = {self.source!r} and data.mixture are both given: leave one of them out, or "
                "name the source in the mixture, with a weight."
            )
        return self

    @field_validator("mixture")
    @classmethod
    def _weighted(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        for one in given:
            source, _, weight = one.rpartition("=")
            if not source or not _is_positive(weight):
                raise ConfigError(
                    f"data.mixture holds {one!r}: write a source and a weight above 0, as SOURCE=3."
                )
        if len({one.rpartition("=")[0] for one in given}) < len(given):
            raise ConfigError("data.mixture names a source twice: write its weight once.")
        return given


class ParallelConfig(Section):
    """The plan of a run on pp × dp × cp × tp ranks."""

    pp: Count = 1
    """pipeline-parallel degree: ranks the layers are spread over"""
    tp: Count = 1
    """tensor-parallel degree: ranks that each matrix is partitioned over"""
    cp: Count = 1
    """context-parallel degree: ranks that each hold a part of every sequence"""
    dp: Count = 1
    """data-parallel degree: ranks that each take a share of the batch"""
    replicate: Count = 1
    """copies of sharded state: dp is replicate × shard"""
    ep: Count = 1
    """expert-parallel degree: ranks that each hold some experts of a layer, among those of shard × cp × tp"""
    etp: Count = 1
    """ranks that each expert is partitioned over, by its inner features"""
    strategy: Strategy = "none"
    """what is sharded over the data-parallel and context-parallel ranks"""
    reduce: Reduce = "last"
    """reduce gradients after the last micro-batch, or after each"""
    offload: Offload = "none"
    """what a rank keeps on the CPU: nothing, its parameters while a step runs, or parameters, gradients and
    optimizer state"""
    schedule: Policy = "1f1b"
    """order of the actions of a step"""
    chunks: Count | None = None
    """stages on each pipeline rank; none: the schedule's own"""
    memory_limit: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """the most activations that a rank may hold, in micro-batches; none: as many as 1f1b holds for auto, no
    limit for other schedules"""
    recompute: Recompute = "none"
    """what is recomputed for a layer's backward: nothing, what is cheap, or all but its input"""
    compile: bool | Compile = False
    """whether each distinct layer is compiled when it first trains: true with generated code, where possible
    likewise, others eagerly, or graphs, without generated code"""
    cuda_graphs: bool = False
    """whether the work between two messages is recorded as CUDA graphs and replayed; on GPUs only"""
    linears: Linears | None = None
    """number format in which linears multiply: float8 with one scale a tensor, float8-rowwise with one a row,
    float8-rowwise-gw likewise but for weight gradients; mxfp8 is not implemented; none: the
    precision"""
    sequence_parallel: SequenceParallel = "none"
    """whether tp ranks split what is outside of their matrices (norms, residual stream) by sequence; inputs
    of matrices are then kept for weight gradients, or gathered again"""
    context_parallel: ContextParallel = "auto"
    """how attention reads other ranks' positions: keys and values are sent (ring), or each rank computes some
    heads for all positions (ulysses); auto: what sends less"""
    context_layout: ContextLayout = "zigzag"
    """positions of a context-parallel rank: a chunk from the start and one from the end of the sequence
    (zigzag), every cp-th (striped), or consecutive ones"""
    loss_rows: Count | None = None
    """the most tokens whose logits exist at once: loss and gradients of the head are computed in chunks of
    that many; none: all tokens of a micro-batch at once"""
    overlap: bool | None = None
    """whether weight gradients are computed while tp sums the input's gradient; none: on stages whose
    gradient no other stage waits for"""
    layers_per_stage: tuple[Count, ...] | None = None
    """number of layers of each stage, first stage first, where the embedding, each attention, each MLP and
    the head are a layer; none: the cut with the shortest simulated step"""
    balance: Literal["counted", "measured"] = "counted"
    """layer costs by which stages are cut without layers_per_stage: counts of multiplications, or times
    measured before training"""
    reorder: int = Field(default=0, ge=0)
    """step, counted from 1, after which a shorter order of actions is searched, as for auto, with the costs
    measured in it; 0: never"""


SNAPSHOTS_OF_ELASTIC_RUNS = 10
"""Steps between snapshots, where `run.snapshot_every` is not given."""


class RunConfig(Section):
    """The `run` section of the configuration: output folder, device, limits, checkpoints, checks."""

    dir: Path = Path("runs/latest")
    """folder of metrics, logs, checkpoints and this configuration"""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """threads a rank; none: the cores divided by the local ranks, or as the launcher set them"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where every rank of a host has a GPU, its own or shared by `run.ranks_per_gpu`"""
    ranks_as: Literal["processes", "threads"] = "processes"
    """processes; or threads of one process that run in turns, to debug on the CPU"""
    ranks_per_gpu: int = Field(default=1, ge=1)
    """the most ranks that share a GPU, to try plans of more ranks than GPUs (NCCL 2.30)"""
    memory_limit: float | None = Field(default=None, gt=0)
    """GB (1e9 bytes) of tensors: a run whose predicted memory of a rank is larger is refused; none: no
    limit"""
    hardware: str | None = None
    """hardware on which the step is predicted, a name or a file of plait plan --calibrate; none: known by the
    GPU's name"""
    timeout: float = Field(default=120.0, ge=1)
    """seconds that a rank waits for another one before it fails"""
    compare: int = Field(default=0, ge=0)
    """first steps run again on a single rank to compare; 0: none"""
    guard: bool = False
    """check that all ranks of a group call the same collective, and that the inputs of tensor-parallel
    regions are equal"""
    check_replicas: int = Field(default=0, ge=0)
    """steps between comparisons of replicas on several ranks; 0: none"""
    stragglers: int = Field(default=4, ge=0)
    """steps between comparisons of how long ranks compute, by which slow ones are named; 0: none"""
    rebalance: bool = False
    """divide layers over stages, and rows over replicas, anew, and order actions anew, when ranks become
    slow, or no longer are"""
    check_memory: bool = False
    """find bits that flip in parameters, optimizer state or gradients between steps"""
    recheck_rate: float = Field(default=0.0, ge=0, le=1)
    """share of the runs of layers that another data-parallel rank computes again, to find faulty devices"""
    trace: int = Field(default=0, ge=0)
    """step, counted from 1, whose measured timeline is written to trace.json, trace.svg and trace.html; 0:
    none"""
    save_every: Annotated[int, Field(ge=0)] | None = 0
    """steps between checkpoints in run.dir/checkpoints; 0: only at the end, and when stopped by SIGINT or
    SIGTERM; none: never"""
    keep_last: int = Field(default=2, ge=0)
    """newest checkpoints that are kept; 0: all"""
    keep_every: int = Field(default=0, ge=0)
    """checkpoints at multiples of this step are never removed; 0: none"""
    save_minutes: float = Field(default=0.0, ge=0)
    """minutes after which a checkpoint is saved, besides those of save_every; 0: none"""
    keep_best: bool | Count = False
    """save a checkpoint after each validation with the lowest loss so far, run.dir/checkpoints/best, and keep
    it; a number: keep so many, those with the lowest losses"""
    resume: str = Field(default="no", min_length=1)
    """no; auto: from the newest checkpoint in run.dir that is not damaged, if there is one; or the folder of
    a checkpoint"""
    elastic: bool = False
    """whether ranks outlive a lost one: it is replaced, or they become fewer, and all go on from the last
    snapshot; over several hosts a launcher starts one process on each, which starts the ranks"""
    spares: Annotated[int, Field(ge=0, le=1024)] = 0
    """with run.elastic: processes that wait to take the place of a lost rank"""
    replace: bool | Literal["later"] = True
    """with run.elastic: whether new processes are started for lost ranks; else, without spares, the run goes
    on with fewer; later: with fewer until new processes are ready, and then with as many as before"""
    hosts: tuple[str, ...] = ()
    """with run.elastic: names or addresses of all hosts, in the order of their numbers, at which a host that
    is started again asks where the others have gone on; none: it asks host 0 only"""
    snapshot_every: Annotated[int, Field(ge=0)] | None = None
    """steps between snapshots in memory, from which restarted ranks go on, and run.resume auto; 0: no
    snapshots; none: 10 with run.elastic, else 0"""
    snapshot_folder: Path = Path("/dev/shm")
    """folder in memory for snapshots"""
    snapshot_failure: Literal["stop", "warn"] = "stop"
    """where a snapshot cannot be taken, as where memory is short: stop the run, or go on without, after a
    warning"""
    notes: str = ""
    """text of your own, which the report shows"""
    progress: bool = True
    """show a progress bar"""
    tensorboard: bool = True
    """write TensorBoard logs, where it is installed"""
    csv: bool = True
    """write metrics.csv beside metrics.jsonl"""
    report: bool = True
    """write report.html, the page of the run, at its end"""

    @property
    def snapshot_steps(self) -> int:
        """The steps between snapshots in memory; 0: none are taken."""
        if self.snapshot_every is not None:
            return self.snapshot_every
        return SNAPSHOTS_OF_ELASTIC_RUNS if self.elastic else 0
