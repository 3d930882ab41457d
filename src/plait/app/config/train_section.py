"""The section `train` of the configuration: steps, optimizer, learning rates, validation, samples."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from plait.app.config.optimizer_section import OptimizerConfig, RateConfig, ScheduleConfig, require_taken
from plait.app.config.section import Count, Decay, Section
from plait.errors import ConfigError
from plait.plan.plan import Precision


class TrainConfig(Section):
    """The optimisation: by default AdamW, linear warm-up, then a cosine to the lowest learning rate."""

    steps: Count = Field(default=300, description="optimizer steps")
    epochs: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="in place of steps: how often each sequence of the data is taken; none: steps count",
    )
    batch: Count = Field(default=16, description="sequences a step, over all ranks together")
    microbatches: Count = Field(default=4, description="micro-batches a step, on each data-parallel rank")
    lr: float = Field(default=1e-3, gt=0, description="highest learning rate, reached after the warm-up")
    min_lr: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None,
        description="learning rate of the last step, as a fraction of lr, where it falls; none: 0.1",
    )
    warmup: int = Field(default=20, ge=0, description="steps of linear warm-up")
    schedule: ScheduleConfig = ScheduleConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    weight_decay: Annotated[float, Field(ge=0)] | None = Field(
        default=None,
        description="decay of matrices; vectors do not decay; none: 0.1 for AdamW, else 0",
    )
    betas: tuple[Decay, Decay] | None = Field(
        default=None, description="decay of both moments of Adam and its like; none: 0.9 and 0.95"
    )
    eps: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="epsilon in the optimizer's divisor; none: its own, of AdamW 1e-8"
    )
    rates: tuple[RateConfig, ...] = Field(
        default=(),
        description="learning rate (lr, or scale, a factor of train.lr) and weight_decay of parameters whose "
        "name has the pattern; the first that fits counts",
    )
    freeze: tuple[str, ...] = Field(
        default=(),
        description="patterns of the names of parameters that do not train: whole parts of a name, with *",
    )
    clip: float = Field(
        default=1.0, ge=0, description="largest gradient norm over the whole mesh; 0: no clipping"
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="seed of initial values, data order and samples")
    precision: Precision = Field(default="fp32", description="number format of the computation")
    master_precision: Precision | None = Field(
        default=None,
        description="number format of the parameters that the optimizer updates; none: fp32 for bf16 and "
        "fp16, else like precision",
    )
    gradient_precision: Precision | None = Field(
        default=None,
        description="number format in which gradients are accumulated; none: like master_precision",
    )
    reduce_precision: Precision | None = Field(
        default=None,
        description="number format in which gradients are reduced; none: like gradient_precision",
    )
    loss_scale: float | None = Field(
        default=None, gt=0, description="factor of the loss; none: dynamic for fp16, else 1"
    )
    validate_every: int = Field(default=0, ge=0, description="steps between validations; 0: only at the end")
    validate_batches: Count | None = Field(
        default=None,
        description="the most batches in a validation, of evenly spaced sequences; none: each held-out "
        "sequence once (of random tokens 8 batches)",
    )
    patience: int = Field(
        default=0,
        ge=0,
        description="validations in a row without a lower loss after which the run ends; 0: never",
    )
    watch: str | None = Field(
        default=None,
        min_length=1,
        description="name of the validation that patience and run.keep_best compare; none: the first",
    )
    sample: str = Field(
        default="",
        description="prompt that is continued after training, a question where the data are conversations; "
        "empty: no sample",
    )
    sample_tokens: Count = Field(default=200, description="tokens the sample continues for")
    sample_every: int = Field(
        default=0, ge=0, description="steps between samples, which the report shows; 0: only after training"
    )

    @field_validator("optimizer", "schedule", mode="before")
    @classmethod
    def _by_name(cls, given: object) -> object:
        """Return a name alone as the section with that name."""
        return {"name": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _consistent(self) -> TrainConfig:
        options = {"betas": self.betas, "eps": self.eps}
        given = {f"train.{name}": (name, value) for name, value in options.items() if value is not None}
        require_taken(self.optimizer, given)
        if self.epochs is not None and "steps" in self.model_fields_set:
            raise ConfigError(
                f"train.epochs = {self.epochs:g} and train.steps = {self.steps} are both given: leave one of "
                "them out."
            )
        if self.min_lr is not None and self.schedule.name == "constant":
            raise ConfigError(
                f"train.min_lr = {self.min_lr:g} is given, but train.schedule.name is constant, which does "
                "not fall: leave it out, or choose another schedule."
            )
        if self.sample_every and not self.sample:
            raise ConfigError(
                f"train.sample_every = {self.sample_every} is given without a prompt: set train.sample."
            )
        return self

    @property
    def matrix_decay(self) -> float:
        """The weight decay of matrices."""
        if self.weight_decay is not None:
            return self.weight_decay
        return 0.1 if self.optimizer.name == "AdamW" else 0.0

    @property
    def lowest_lr(self) -> float:
        """The learning rate of the last step, where the schedule falls."""
        return self.lr * (0.1 if self.min_lr is None else self.min_lr)

    def optimizer_options(self) -> dict[str, Any]:
        """Return the options of the optimizer, besides its learning rate and weight decay."""
        options = dict(self.optimizer.given())
        if self.optimizer.name in ("AdamW", "Adam", "NAdam", "RAdam"):
            options["betas"] = (0.9, 0.95) if self.betas is None else self.betas
        return options if self.eps is None else options | {"eps": self.eps}
