"""`Trainer`: one rank's model, engine and optimizer, and a training step with them.

Read this file to see how plait is used.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from plait.comm.mesh import Mesh
from plait.composer import parallelize
from plait.data.batches import rank_rows
from plait.data.tokenizer import printable
from plait.errors import NonFiniteError
from plait.plan import Plan
from plait.tensor.losses import cross_entropy
from plait.train.build import build_model, build_optimizer, initial_weights, learning_rate
from plait.train.config import Config
from plait.train.meter import StepNumbers
from plait.train.run_data import Data


class Trainer:
    """Trains `config.model` on `data` over `mesh` by `plan`. Every rank makes one with the same arguments."""

    def __init__(self, config: Config, plan: Plan, mesh: Mesh, data: Data) -> None:
        settings = config.train
        model = build_model(config.model, data.vocab)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        values = initial_weights(config.model, model, settings.seed)
        self.has_weights = values is not None
        self.engine = parallelize(model, plan, mesh, loss=cross_entropy, seed=settings.seed, values=values)
        groups = self.engine.parameter_groups(weight_decay=settings.weight_decay)
        self.optimizer = build_optimizer(groups, settings)
        self._settings = settings
        self._data = data
        self._mesh = mesh
        self._rows = rank_rows(mesh.index("dp"), mesh.size("dp"), settings.batch)

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """Train on the batch of `step`, counted from 0; return its loss and gradient norm, 0-d.

        The loss is the mean over the global batch, the norm is that before clipping. Both are
        the same on every rank, and returned without waiting for the device.
        Communication: the engine's (activations over `pp`, attention over `cp`, regions and the loss over
        `tp`, gradients over `dp_cp`, the norm over `model`).
        """
        loss = self.forward_backward(step)
        return loss, self.engine.step(self.optimizer, self.max_norm)

    def forward_backward(self, step: int) -> Tensor:
        """Set the learning rate of `step` and compute its gradients; return the loss."""
        rate = self.learning_rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        inputs, targets = self._data.training.batch(step, self._rows)

        self.optimizer.zero_grad()
        return self.engine.forward_backward(inputs, targets)

    @property
    def max_norm(self) -> float:
        """The maximum gradient norm; infinity without clipping."""
        return self._settings.clip or math.inf

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of `step`, counted from 0."""
        settings = self._settings
        floor = settings.lr * settings.min_lr
        return learning_rate(
            step, steps=settings.steps, peak=settings.lr, floor=floor, warmup=settings.warmup
        )

    def validate(self, step: int) -> float | None:
        """Return the mean loss over the validation batches, equal on every rank; None without any.

        Raises `NonFiniteError`.
        """
        batches, count = self._data.validation, self._settings.validate_batches
        if batches is None:
            return None
        total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        for number in range(count):
            inputs, targets = batches.batch(number, self._rows)
            total += self.engine.evaluate(inputs, targets)
        mean = float(total) / count
        if not math.isfinite(mean):
            raise NonFiniteError(
                f"step {step + 1}: the validation loss is {mean} after it, seen on the last stage: "
                "lower train.lr or raise train.warmup."
            )
        return mean

    def sample(self) -> str | None:
        """Return a continuation of the prompt `train.sample`; None without one or without a text tokenizer.

        Every rank calls it and gets the same text. Communication: that of `Engine.generate`.
        """
        settings, tokenizer = self._settings, self._data.tokenizer
        prompt = tokenizer.encode([settings.sample.encode()])
        if not self._data.readable or not len(prompt):
            return None
        start = torch.tensor([prompt.tolist()], dtype=torch.int64, device=self._mesh.device)
        tokens = self.engine.generate(start, settings.sample_tokens, temperature=0.8, seed=settings.seed)
        return printable(tokenizer.decode(tokens[0].tolist()))

    def refuse_non_finite(self, step: int, numbers: StepNumbers) -> None:
        """Raise `NonFiniteError` on every rank, with rank and stage, where the loss or norm is not finite.

        `numbers` are those of `step`. A norm that overflows a loss scale which can be lowered is no error.
        """
        loss, norm = numbers.row["loss"], numbers.row["grad_norm"]
        overflows = self.engine.adapts_loss_scale and self.engine.loss_scale >= 1
        if math.isfinite(loss) and (math.isfinite(norm) or overflows):
            return
        mesh, schedule = self._mesh, self.engine.schedule
        if not math.isfinite(loss):
            stages, what, value = [schedule.stages - 1], "loss", loss
            rank = numbers.loss_rank % mesh.size("world")
        else:
            rank = numbers.gradient_rank % mesh.size("world")
            stages = list(schedule.stages_of(mesh.coordinate_of(rank)["pp"]))
            what, value = "gradient norm", norm
        where = f"stage{'s' * (len(stages) > 1)} {' and '.join(map(str, stages))}"
        raise NonFiniteError(
            f"step {step + 1}: the {what} is {value} on rank {rank}, {where}: "
            "lower train.lr, raise train.warmup, or look at the data of that step."
        )
