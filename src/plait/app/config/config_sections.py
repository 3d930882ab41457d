"""The sections `model`, `data`, `parallel`, `run` of the configuration, and the base class of sections."""

from __future__ import annotations

import re
from math import inf
from pathlib import Path
from typing import Annotated, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from plait.app.config.model_section import OWN_MODELS, with_folder_sizes
from plait.app.data.recorded_tokenizer import recorded_tokenizer
from plait.errors import ConfigError
from plait.plan.model_sizes import Decoder, Family
from plait.plan.plan import (
    Compile,
    ContextLayout,
    ContextParallel,
    Offload,
    Policy,
    Recompute,
    Reduce,
    SequenceParallel,
    Strategy,
)

Count = Annotated[int, Field(ge=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]


def is_positive_number(text: str) -> bool:
    """Return whether `text` spells a finite number above 0."""
    try:
        return 0 < float(text) < inf
    except ValueError:
        return False


class Section(BaseModel):
    """Base class of the sections: frozen, rejects unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class LoraConfig(Section):
    """Low-rank adapters of frozen linears (Hu et al. 2021)."""

    rank: int = Field(
        default=0, ge=0, le=2**16, description="rank of LoRA's adapters; 0: none, and all parameters train"
    )
    alpha: float = Field(default=16.0, gt=0, description="adapters are scaled by alpha / rank")
    dropout: Decay = Field(default=0.0, description="dropout before the adapters")
    targets: tuple[str, ...] | None = Field(
        default=None,
        description="patterns of the paths of linears that are adapted, or their ends; none: all but the "
        "head",
    )
    adapter: str | None = Field(
        default=None,
        min_length=1,
        description="a folder of peft whose adapter is trained on, with its own rank, alpha, dropout and "
        "targets",
    )

    @field_validator("targets", mode="before")
    @classmethod
    def _tuple(cls, given: object) -> object:
        """Return lists, which sections that complete themselves are given of JSON, as tuples."""
        return tuple(given) if isinstance(given, list) else given

    @property
    def adapts(self) -> bool:
        """Whether the linears of the model get LoRA adapters."""
        return self.rank > 0 or self.adapter is not None

    def changed_fields(self) -> dict[str, object]:
        """Return the fields that differ from their default."""
        return {name: value for name, value in self if value != type(self).model_fields[name].default}


class ModelConfig(Section):
    """The model, built as a sequence of layers."""

    name: str = Field(
        default="gpt2",
        min_length=1,
        description="gpt2, llama, or a folder with the config.json of a Hugging Face model, whose weights "
        "are read if it holds any",
    )
    layers: Count = Field(default=4, description="transformer blocks")
    hidden: Count = Field(default=128, description="width of the residual stream, a multiple of heads")
    heads: Count = Field(default=4, description="attention heads of each block")
    kv_heads: Count | None = Field(
        default=None,
        description="llama's key and value heads, shared by equally many query heads each; none: as many as "
        "heads",
    )
    inner: Count | None = Field(
        default=None,
        description="width inside llama's MLP; none: 2/3 · 4 · hidden, rounded up to a multiple of 256",
    )
    vocab: Annotated[int, Field(ge=2)] | None = Field(
        default=None, description="tokens in the vocabulary; none: as many as the tokenizer has"
    )
    context: Count = Field(
        default=128,
        description="tokens in a sequence; of a model in a folder, if not given, as many as the longest "
        "conversation of the data has, or 1024",
    )
    tied: bool | None = Field(
        default=None,
        description="whether the head shares the embedding's weight; none: as the family does, gpt2 yes, "
        "llama no",
    )
    lora: LoraConfig = LoraConfig()

    @model_validator(mode="before")
    @classmethod
    def _sized(cls, given: object) -> object:
        name = given.get("name", OWN_MODELS[0]) if isinstance(given, dict) else OWN_MODELS[0]
        return given if name in OWN_MODELS or not isinstance(name, str) else with_folder_sizes(given)

    def decoder(self, vocab: int) -> Decoder:
        """Return the sizes of plait's own model with `vocab` tokens. Raises ModelError where none fits."""
        tied = {} if self.tied is None else {"tied": self.tied}
        given = self.model_dump(exclude={"name", "lora", "tied", "vocab"})
        return Decoder.of_family(cast(Family, self.name), vocab=vocab, **given, **tied)

    @property
    def folder(self) -> Path | None:
        """The folder of a Hugging Face model, else None."""
        return None if self.name in OWN_MODELS else Path(self.name).expanduser()


class DataConfig(Section):
    """The training data."""

    source: str = Field(
        default="stdlib",
        min_length=1,
        description="stdlib (the source of Python's standard library), random (uniform tokens from the "
        "seed), a text file, a folder, a glob, token arrays (.bin, .npy), a folder of `plait data prepare`, "
        "conversations (.jsonl or .parquet with messages, or prompt and completion), texts (likewise, with "
        "text), or a data set of Hugging Face (hf://OWNER/NAME:SPLIT)",
    )
    tokenizer: str | None = Field(
        default=None,
        min_length=1,
        description="bytes, or the path of a tokenizer.json or its folder; none: that of a prepared corpus, "
        "else that in the model's folder, else bytes",
    )
    mixture: tuple[str, ...] = Field(
        default=(),
        description="in place of source: sources, each as SOURCE=WEIGHT, whose sequences are mixed by weight",
    )
    validation_source: str | dict[str, str] = Field(
        default="",
        description="a source for validation, in place of a fraction of the corpus; or a table of several, "
        "each with a name",
    )
    dtype: Literal["uint16", "uint32"] = Field(
        default="uint16", description="type of the tokens in a .bin array"
    )
    validation: Decay = Field(default=0.05, description="fraction of the corpus kept for validation; 0: none")

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
            if not source or not is_positive_number(weight):
                raise ConfigError(
                    f"data.mixture holds {one!r}: write a source and a weight above 0, as SOURCE=3."
                )
        if len({one.rpartition("=")[0] for one in given}) < len(given):
            raise ConfigError("data.mixture names a source twice: write its weight once.")
        return given


class ParallelConfig(Section):
    """The plan of a run on pp × dp × cp × tp ranks."""

    pp: Count = Field(default=1, description="pipeline-parallel degree: ranks the layers are spread over")
    tp: Count = Field(
        default=1, description="tensor-parallel degree: ranks that each matrix is partitioned over"
    )
    cp: Count = Field(
        default=1, description="context-parallel degree: ranks that each hold a part of every sequence"
    )
    dp: Count = Field(
        default=1, description="data-parallel degree: ranks that each take a share of the batch"
    )
    replicate: Count = Field(default=1, description="copies of sharded state: dp is replicate × shard")
    strategy: Strategy = Field(
        default="none", description="what is sharded over the data-parallel and context-parallel ranks"
    )
    reduce: Reduce = Field(
        default="last", description="reduce gradients after the last micro-batch, or after each"
    )
    offload: Offload = Field(
        default="none",
        description="what a rank keeps on the CPU: nothing, its parameters while a step runs, or parameters, "
        "gradients and optimizer state",
    )
    schedule: Policy = Field(default="1f1b", description="order of the actions of a step")
    chunks: Count | None = Field(
        default=None, description="stages on each pipeline rank; none: the schedule's own"
    )
    memory_limit: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None,
        description="the most activations that a rank may hold, in micro-batches; none: as many as 1f1b "
        "holds for auto, no limit for other schedules",
    )
    recompute: Recompute = Field(
        default="none",
        description="what is recomputed for a layer's backward: nothing, what is cheap, or all but its input",
    )
    compile: bool | Compile = Field(
        default=False,
        description="whether each distinct layer is compiled when it first trains: true with generated code, "
        "where possible likewise, others eagerly, or graphs, without generated code",
    )
    sequence_parallel: SequenceParallel = Field(
        default="none",
        description="whether tp ranks split what is outside of their matrices (norms, residual stream) by "
        "sequence; inputs of matrices are then kept for weight gradients, or gathered again",
    )
    context_parallel: ContextParallel = Field(
        default="auto",
        description="how attention reads other ranks' positions: keys and values are sent (ring), or each "
        "rank computes some heads for all positions (ulysses); auto: what sends less",
    )
    context_layout: ContextLayout = Field(
        default="zigzag",
        description="positions of a context-parallel rank: a chunk from the start and one from the end of "
        "the sequence (zigzag), every cp-th (striped), or consecutive ones",
    )
    loss_rows: Count | None = Field(
        default=None,
        description="the most tokens whose logits exist at once: loss and gradients of the head are computed "
        "in chunks of that many; none: all tokens of a micro-batch at once",
    )
    overlap: bool | None = Field(
        default=None,
        description="whether weight gradients are computed while tp sums the input's gradient; none: on "
        "stages whose gradient no other stage waits for",
    )
    layers_per_stage: tuple[Count, ...] | None = Field(
        default=None,
        description="number of layers of each stage, first stage first, where the embedding, each attention, "
        "each MLP and the head are a layer; none: the cut with the shortest simulated step",
    )
    balance: Literal["counted", "measured"] = Field(
        default="counted",
        description="layer costs by which stages are cut without layers_per_stage: counts of "
        "multiplications, or times measured before training",
    )
    reorder: int = Field(
        default=0,
        ge=0,
        description="step, counted from 1, after which a shorter order of actions is searched, as for auto, "
        "with the costs measured in it; 0: never",
    )


class RunConfig(Section):
    """The `run` section of the configuration: output folder, device, limits, checkpoints, checks."""

    dir: Path = Field(
        default=Path("runs/latest"), description="folder of metrics, logs, checkpoints and this configuration"
    )
    threads: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        default=None,
        description="threads a rank; none: the cores divided by the local ranks, or as the launcher set them",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto: cuda where there is one"
    )
    ranks_as: Literal["processes", "threads"] = Field(
        default="processes",
        description="processes; or threads of one process that run in turns, to debug on the CPU",
    )
    ranks_per_gpu: int = Field(
        default=1,
        ge=1,
        description="the most ranks that share a GPU, to try plans of more ranks than GPUs (NCCL 2.30)",
    )
    memory_limit: float | None = Field(
        default=None,
        gt=0,
        description="GB (1e9 bytes) of tensors: a run whose predicted memory of a rank is larger is refused; "
        "none: no limit",
    )
    hardware: str | None = Field(
        default=None,
        description="hardware on which the step is predicted, a name or a file of plait plan --calibrate; "
        "none: known by the GPU's name",
    )
    timeout: float = Field(
        default=120.0, ge=1, description="seconds that a rank waits for another one before it fails"
    )
    compare: int = Field(
        default=0, ge=0, description="first steps run again on a single rank to compare; 0: none"
    )
    guard: bool = Field(
        default=False,
        description="check that all ranks of a group call the same collective, and that the inputs of "
        "tensor-parallel regions are equal",
    )
    check_replicas: int = Field(
        default=0, ge=0, description="steps between comparisons of replicas on several ranks; 0: none"
    )
    trace: int = Field(
        default=0,
        ge=0,
        description="step, counted from 1, whose measured timeline is written to trace.json, trace.svg and "
        "trace.html; 0: none",
    )
    save_every: Annotated[int, Field(ge=0)] | None = Field(
        default=0,
        description="steps between checkpoints in run.dir/checkpoints; 0: only at the end, and when stopped "
        "by SIGINT or SIGTERM; none: never",
    )
    keep_last: int = Field(default=2, ge=0, description="newest checkpoints that are kept; 0: all")
    keep_every: int = Field(
        default=0, ge=0, description="checkpoints at multiples of this step are never removed; 0: none"
    )
    save_minutes: float = Field(
        default=0.0,
        ge=0,
        description="minutes after which a checkpoint is saved, besides those of save_every; 0: none",
    )
    keep_best: bool | Count = Field(
        default=False,
        description="save a checkpoint after each validation with the lowest loss so far, "
        "run.dir/checkpoints/best, and keep it; a number: keep so many, those with the lowest losses",
    )
    resume: str = Field(
        default="no",
        min_length=1,
        description="no; auto: from the newest checkpoint in run.dir that is not damaged, if there is one; "
        "or the folder of a checkpoint",
    )
    notes: str = Field(default="", description="text of your own, which the report shows")
    progress: bool = Field(default=True, description="show a progress bar")
    tensorboard: bool = Field(default=True, description="write TensorBoard logs, where it is installed")
    csv: bool = Field(default=True, description="write metrics.csv beside metrics.jsonl")
    report: bool = Field(default=True, description="write report.html, the page of the run, at its end")
