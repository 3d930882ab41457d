"""The configuration of a training run: one typed tree of five sections, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from plait.errors import ConfigError
from plait.plan import Plan, Precision, Recompute, Reduce, Strategy

Count = Annotated[int, Field(ge=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Policy = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "auto"]


class Section(BaseModel):
    """Base of the sections: frozen, and nothing unknown in it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelConfig(Section):
    """The model, built as a sequence of layers."""

    name: Literal["gpt2"] = Field(default="gpt2", description="architecture")
    layers: Count = Field(default=4, description="transformer blocks")
    hidden: Count = Field(default=128, description="width of the residual stream, a multiple of heads")
    heads: Count = Field(default=4, description="attention heads of each block")
    vocab: Annotated[int, Field(ge=2)] | None = Field(
        default=None, description="tokens in the vocabulary; none: as many as the tokenizer has"
    )
    context: Count = Field(default=128, description="tokens in a sequence")
    tied: bool = Field(default=True, description="whether the head shares the embedding's weight")


class DataConfig(Section):
    """What is learnt."""

    source: str = Field(
        default="stdlib",
        min_length=1,
        description="stdlib (the source of Python's standard library), random (uniform tokens from the "
        "seed), a text file, a folder, a glob, or a token array (.bin, .npy)",
    )
    tokenizer: str = Field(
        default="bytes", min_length=1, description="bytes, or the path of a tokenizer.json"
    )
    dtype: Literal["uint16", "uint32"] = Field(
        default="uint16", description="type of the tokens in a .bin array"
    )
    validation: Decay = Field(default=0.05, description="fraction of the corpus kept for validation; 0: none")


class TrainConfig(Section):
    """The optimisation: AdamW, linear warm-up, then a cosine down to the lowest learning rate."""

    steps: Count = Field(default=300, description="optimizer steps")
    batch: Count = Field(default=16, description="sequences a step, over all ranks together")
    microbatches: Count = Field(default=4, description="micro-batches a step, on each data-parallel rank")
    lr: float = Field(default=1e-3, gt=0, description="highest learning rate, reached after the warm-up")
    min_lr: float = Field(default=0.1, ge=0, le=1, description="lowest learning rate, as a fraction of lr")
    warmup: int = Field(default=20, ge=0, description="steps of linear warm-up")
    weight_decay: float = Field(
        default=0.1, ge=0, description="AdamW's decay of matrices; vectors do not decay"
    )
    betas: tuple[Decay, Decay] = Field(default=(0.9, 0.95), description="AdamW's decay of both moments")
    eps: float = Field(default=1e-8, gt=0, description="AdamW's epsilon")
    clip: float = Field(
        default=1.0, ge=0, description="largest gradient norm over the whole mesh; 0: no clipping"
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="seed of initial values, data order and samples")
    precision: Precision = Field(default="fp32", description="number format of the computation")
    validate_every: int = Field(default=0, ge=0, description="steps between validations; 0: only at the end")
    validate_batches: Count = Field(default=8, description="batches in a validation")
    sample: str = Field(default="", description="prompt that is continued after training; empty: no sample")
    sample_tokens: Count = Field(default=200, description="tokens the sample continues for")


class ParallelConfig(Section):
    """The plan: how the run is spread over pp × dp × tp ranks."""

    pp: Count = Field(default=1, description="pipeline-parallel degree: ranks the layers are spread over")
    tp: Count = Field(default=1, description="tensor-parallel degree: ranks that each matrix is cut between")
    dp: Count = Field(
        default=1, description="data-parallel degree: ranks that each take a share of the batch"
    )
    replicate: Count = Field(default=1, description="copies of sharded state: dp is replicate × shard")
    strategy: Strategy = Field(default="none", description="what is sharded over the data-parallel ranks")
    reduce: Reduce = Field(
        default="last", description="reduce gradients after the last micro-batch, or after each"
    )
    schedule: Policy = Field(default="1f1b", description="order of the actions of a step")
    chunks: Count | None = Field(
        default=None, description="stages on each pipeline rank; none: the schedule's own"
    )
    recompute: Recompute = Field(
        default="none", description="activations computed again in the backward pass"
    )
    layers_per_stage: tuple[Count, ...] | None = Field(
        default=None,
        description="cut by hand: how many layers each stage has, first stage first, where the embedding, "
        "each attention, each MLP and the head are a layer; none: the shortest simulated step",
    )


class RunConfig(Section):
    """Where and how the ranks run."""

    dir: Path = Field(
        default=Path("runs/latest"), description="folder that metrics, logs and this configuration go to"
    )
    threads: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        default=None, description="threads a rank; none: the cores shared out, or as the launcher set them"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto: cuda where there is one"
    )
    timeout: float = Field(
        default=120.0, ge=1, description="seconds to wait for another rank before giving it up"
    )
    compare: int = Field(
        default=0, ge=0, description="first steps run again on a single rank to compare; 0: none"
    )
    progress: bool = Field(default=True, description="show a progress bar")
    tensorboard: bool = Field(default=True, description="write TensorBoard logs, where it is installed")
    csv: bool = Field(default=True, description="write metrics.csv beside metrics.jsonl")


class Config(Section):
    """A whole run. Making one raises `ConfigError` where its fields contradict each other."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    parallel: ParallelConfig = ParallelConfig()
    run: RunConfig = RunConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _check_available(self)
        _check_heads(self.model)
        _check_batch(self.train, self.parallel.dp)
        _check_parallel(self.parallel)
        if self.run.compare > self.train.steps:
            raise ConfigError(
                f"run.compare = {self.run.compare} is more than train.steps = {self.train.steps}: "
                f"set run.compare to at most {self.train.steps}."
            )
        return self

    def plan(self) -> Plan:
        """Return the plan that `parallel`, `train.microbatches` and `train.precision` describe."""
        return Plan(
            **self.parallel.model_dump(),
            microbatches=self.train.microbatches,
            precision=self.train.precision,
        )


@dataclass(frozen=True)
class _Available:
    """The values of a field that can be run today, when the field knows more; `what` is still to come."""

    field: str
    values: tuple[object, ...]
    what: str


_AVAILABLE = (
    _Available("tp", (1,), "tensor parallelism"),
    _Available("strategy", ("none",), "sharding over the data-parallel ranks"),
    _Available("reduce", ("last",), "reducing after each micro-batch"),
    _Available("schedule", ("1f1b", "gpipe"), "this schedule"),
    _Available("chunks", (1, None), "more than one stage a rank"),
    _Available("recompute", ("none",), "recomputing activations"),
)


def _check_available(config: Config) -> None:
    for row in _AVAILABLE:
        value = getattr(config.parallel, row.field)
        if value not in row.values:
            remedy = " or ".join(str(known) for known in row.values if known is not None)
            raise ConfigError(
                f"parallel.{row.field} is {value}: {row.what} is not available yet, set it to {remedy}."
            )


def _check_heads(model: ModelConfig) -> None:
    if model.hidden % model.heads:
        raise ConfigError(
            f"model.hidden = {model.hidden} is not divisible by model.heads = {model.heads}: "
            f"set model.hidden to {_multiples(model.hidden, model.heads)}, or change model.heads."
        )


def _check_batch(train: TrainConfig, dp: int) -> None:
    parts = dp * train.microbatches
    if train.batch % parts:
        raise ConfigError(
            f"train.batch = {train.batch} does not divide into parallel.dp = {dp} times "
            f"train.microbatches = {train.microbatches} equal parts: "
            f"set train.batch to {_multiples(train.batch, parts)}, or change train.microbatches."
        )


def _check_parallel(parallel: ParallelConfig) -> None:
    if parallel.dp % parallel.replicate:
        divisors = [str(n) for n in range(1, parallel.dp + 1) if parallel.dp % n == 0]
        raise ConfigError(
            f"parallel.replicate = {parallel.replicate} does not divide parallel.dp = {parallel.dp}: "
            f"set parallel.replicate to {' or '.join(divisors)}."
        )
    counts, chunks = parallel.layers_per_stage, parallel.chunks or 1
    if counts is not None and len(counts) != parallel.pp * chunks:
        raise ConfigError(
            f"parallel.layers_per_stage = {list(counts)} cuts another number of stages than "
            f"parallel.pp = {parallel.pp} times parallel.chunks = {chunks}: "
            "give one count for each stage, or leave it out."
        )


def _multiples(value: int, step: int) -> str:
    """Return the positive multiples of `step` next to `value`: "8 or 12"."""
    below = value // step * step
    return f"{below} or {below + step}" if below else str(step)
