"""An optimizer that counts its steps in tensors, as torch's capturable ones do, on any device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class TensorAdam(torch.optim.Optimizer):
    """Adam, whose learning rate may be a number or a tensor."""

    def __init__(self, parameters: Iterable[Any], lr: float | Tensor, capturable: bool = True) -> None:
        super().__init__(parameters, {"lr": lr, "eps": 1e-6, "capturable": capturable})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float64)
                    state["mean"], state["square"] = (torch.zeros_like(parameter) for _ in range(2))
                state["step"] += 1
                state["mean"].lerp_(parameter.grad, 0.1)
                state["square"].mul_(0.999).addcmul_(parameter.grad, parameter.grad, value=0.001)
                mean = state["mean"] / (1 - 0.9 ** state["step"])
                root = (state["square"] / (1 - 0.999 ** state["step"])).sqrt() + group["eps"]
                parameter.sub_(group["lr"] * mean / root)
