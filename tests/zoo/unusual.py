"""Unusual models and plans that are right: tuples, casts, optimizers, families of transformers, layouts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import plait
from parity import data, huggingface_cases
from parity.case import Case
from parity.cases import case, sparse_llama
from parity.contexts import mixing, packed
from parity.layers import CLASSES, HIDDEN
from plait.plan.plan import Plan
from plait.verification.options import VerifyOptions
from zoo import cases
from zoo.context import PACKED
from zoo.fine_tuning import ADAPTED, ADAPTED_AND_DROPPING, NORMS
from zoo.float8_linears import MIXED
from zoo.float8_linears import MODEL as IN_FLOAT8
from zoo.routing import CORRECTED

RESUMED = VerifyOptions(perturbations=2, resumes=True)
NATIVE = replace(RESUMED, mode="native")
EXACT = VerifyOptions(mode="exact", steps=1)
BF16: dict[str, Any] = {"precision": "bf16", "master_precision": "fp32"}
FP16: dict[str, Any] = {**BF16, "precision": "fp16", "gradient_precision": "fp16"}
TWO = Plan(microbatches=2)


@dataclass(frozen=True)
class Right:
    """A model and a plan on which nothing may differ."""

    name: str
    model: Case
    plan: Plan
    options: VerifyOptions = RESUMED


class SingleInside(nn.Module):
    """Divides by a root mean square that is computed in float32, in a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        result: Tensor = x + self.linear(
            (wide / (wide.square().mean(-1, keepdim=True).sqrt() + 1e-3)).to(x.dtype)
        )
        return result


class Router(nn.Module):
    """Takes a softmax in float32, as routers of mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.linear = nn.Linear(HIDDEN, 3), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1, dtype=torch.float32).to(x.dtype)
        result: Tensor = x + self.linear(x) * weights[..., :1]
        return result


class _Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.float().sin().to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return (gradient.float() * x.float().cos()).to(gradient.dtype)


class OwnFunction(nn.Module):
    """A function with a backward of its own, both in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + _Sine.apply(self.linear(x))  # type: ignore[no-untyped-call]
        return result


class Opens(nn.Module):
    """Gives numbers of rows and a factor beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.linear(x), x.argmax(-1), x.detach().abs()


class Between(nn.Module):
    """Takes and passes on whole numbers and a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(HIDDEN, HIDDEN), nn.Embedding(HIDDEN, HIDDEN)

    def forward(self, value: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x, numbers, factor = value
        return self.linear(x) * factor + self.table(numbers), numbers, factor


class Closes(nn.Module):
    """Logits."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, CLASSES)

    def forward(self, value: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        logits: Tensor = self.linear(value[0] * value[2])
        return logits


def layers(*kinds: Any) -> Case:
    """Layers of these kinds, on vectors."""

    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(1)
            return nn.Sequential(*(kind() for kind in kinds))

    return case(build, data.draw_vectors)


def frozen_and_tied() -> nn.Module:
    linear, last = partial(nn.Linear, HIDDEN, HIDDEN), nn.Linear(HIDDEN, CLASSES)
    model = nn.Sequential(linear(), nn.Tanh(), linear(), nn.LayerNorm(HIDDEN), linear(), last)
    model[2].weight = model[0].weight
    model[3].weight.requires_grad_(False)
    model[4].requires_grad_(False)
    return model


LINEAR, LAST = partial(nn.Linear, HIDDEN, HIDDEN), partial(nn.Linear, HIDDEN, CLASSES)
SINGLE = layers(LINEAR, SingleInside, nn.GELU, SingleInside, LAST)
ROUTED, OWN = layers(LINEAR, Router, Router, LAST), layers(LINEAR, OwnFunction, OwnFunction, LAST)
PASSED, LINEARS = layers(Opens, Between, Between, Closes), layers(LINEAR, LINEAR, LINEAR, LAST)
SHARED = layers(frozen_and_tied)


def _sgd(groups: Any) -> Any:
    return torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True)


def _rmsprop(groups: Any) -> Any:
    return torch.optim.RMSprop(groups, lr=1e-3, centered=True, momentum=0.5)


def _amsgrad(groups: Any) -> Any:
    return torch.optim.AdamW(groups, lr=1e-3, amsgrad=True)


_muon = partial(plait.Muon, lr=0.02)
_adafactor = partial(plait.Owned, torch.optim.Adafactor, lr=0.01)


def _of(name: str) -> Case:
    return huggingface_cases.case(name)


def _scaled(kind: str, **more: float) -> Case:
    parameters = {"rope_type": kind, "rope_theta": 100.0, "factor": 4.0, **more}
    make = partial(huggingface_cases.llama, rope_parameters=parameters)
    return huggingface_cases.case(f"llama-{kind}", make)


def _dropping(name: str) -> Case:
    return huggingface_cases.case(f"{name}-dropping", huggingface_cases.DROPPING[name])


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 4}
CP, TP, DP, PP = (replace(TWO, **{axis: 2}) for axis in ("cp", "tp", "dp", "pp"))
KEEP, REGATHER = (replace(TP, sequence_parallel=kind) for kind in ("keep", "regather"))
FULL = replace(DP, strategy="full")

WIDE_SIZES = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 8}
"""Multiples of 16."""
TRANSFORMERS = (
    Right(
        "gpt-oss in float8",
        huggingface_cases.case("gpt-oss wide", partial(huggingface_cases.gpt_oss, **WIDE_SIZES)),
        Plan(dp=2, etp=2, linears="float8-rowwise-gw"),
    ),
    Right("gemma2 cp", _of("gemma2"), CP),
    Right("gemma2 packed cp", packed(_of("gemma2"), 8), CP),
    Right("gemma2 keep", _of("gemma2"), KEEP),
    Right("gemma2 selective", _of("gemma2"), replace(PP, recompute="selective", microbatches=4)),
    Right(
        "gemma3 packed striped",
        packed(_of("gemma3"), 8),
        replace(CP, context_layout="striped", strategy="full"),
    ),
    Right("gemma3 capped keep", _of("gemma3-capped-untied"), replace(KEEP, recompute="full")),
    Right("yarn cp 3", _of("llama-scaled"), Plan(cp=3, context_layout="contiguous")),
    Right("yarn packed tp", packed(_of("llama-scaled"), 8), TP),
    Right(
        "llama biased zb-h1", _of("llama-tied-biased"), replace(TP, pp=2, microbatches=3, schedule="zb-h1")
    ),
    Right("llama3", _scaled("llama3", **LLAMA3), PP),
    Right("linear", _scaled("linear"), DP),
    Right("qwen2 sliding ulysses", _of("qwen2-sliding"), replace(CP, context_parallel="ulysses")),
    Right("qwen3 packed each", packed(_of("qwen3"), 8), replace(FULL, reduce="each")),
    Right("olmo2 packed keep", packed(_of("olmo2"), 8), KEEP),
    Right("smollm3 cp regather", _of("smollm3"), replace(REGATHER, cp=2)),
    Right("phi3 partly rotated", _of("phi3-partly-rotated"), replace(TP, pp=2)),
    Right("phi3 packed", packed(_of("phi3"), 8), CP),
    Right("mistral gpipe", _of("mistral"), Plan(pp=3, microbatches=3, schedule="gpipe")),
    Right("gpt-neox in turn", _of("gpt-neox-in-turn"), REGATHER),
    Right("gpt-oss packed ulysses", packed(_of("gpt-oss"), 8), replace(CP, context_parallel="ulysses")),
    Right("gpt-oss keep", _of("gpt-oss"), replace(KEEP, recompute="full")),
    Right("deepseek-v3 regather", _of("deepseek-v3"), replace(REGATHER, cp=2)),
    Right("deepseek-v3 packed", packed(_of("deepseek-v3"), 8), replace(TP, pp=2, schedule="zb-h1")),
    Right("gpt-neox packed", packed(_of("gpt-neox"), 8), PP),
    Right("gpt-neox dropping packed", packed(_dropping("gpt-neox"), 8), DP),
    Right("gpt2 scaled", _of("gpt2-untied-scaled"), replace(TP, pp=2)),
    Right("gpt2 dropping", _dropping("gpt2"), CP),
    Right("phi3 dropping", _dropping("phi3"), TP),
    Right("gemma2 bf16", _of("gemma2"), replace(TP, **BF16), NATIVE),
    Right("olmo2 bf16", _of("olmo2"), replace(TP, pp=2, **BF16), NATIVE),
    Right("qwen3 bf16", _of("qwen3"), replace(CP, **BF16), NATIVE),
    Right("llama fp16", _of("llama"), replace(FULL, **FP16), NATIVE),
    Right("gemma3 fp32", _of("gemma3"), replace(CP, precision="fp32"), NATIVE),
    Right("yarn bf16", _of("llama-scaled"), replace(TP, **BF16), NATIVE),
    Right("gpt-oss bf16", _of("gpt-oss"), replace(TP, pp=2, **BF16), NATIVE),
    Right("deepseek-v3 bf16", _of("deepseek-v3"), replace(CP, **BF16), NATIVE),
    Right("smollm3 packed bf16", packed(_of("smollm3"), 8), replace(PP, **BF16), NATIVE),
)
OTHERS = (
    Right("float8 of zeros, odd sizes and frozen", MIXED, replace(PP, linears="float8-rowwise")),
    Right("float8 of zeros recomputed", MIXED, replace(FULL, recompute="full", linears="float8")),
    Right("float8 exact", IN_FLOAT8, replace(TWO, tp=2, cp=2, linears="float8"), EXACT),
    Right(
        "float8 in bf16, gathered in 8 bits",
        IN_FLOAT8,
        replace(TWO, dp=2, tp=2, strategy="full", linears="float8", **BF16),
        NATIVE,
    ),
    Right(
        "float8 in bf16 by rows",
        IN_FLOAT8,
        replace(TWO, tp=2, sequence_parallel="keep", linears="float8-rowwise-gw", **BF16),
        NATIVE,
    ),
    Right("float32 inside", SINGLE, replace(PP, microbatches=4)),
    Right("float32 inside recomputed", SINGLE, replace(FULL, recompute="full")),
    Right("softmax in float32", ROUTED, replace(PP, microbatches=3, schedule="zb-h1")),
    Right("own function", OWN, replace(PP, dp=2)),
    Right("tuples", PASSED, Plan(pp=3, microbatches=3)),
    Right(
        "tuples recomputed by layer",
        PASSED,
        replace(PP, schedule="gpipe", microbatches=3, recompute=("none", "full", "selective", "full")),
    ),
    Right("frozen and tied", SHARED, PP),
    Right("uneven stages", SHARED, replace(PP, layers_per_stage=(1, 5), microbatches=3)),
    Right("interleaved", LINEARS, replace(PP, schedule="interleaved", chunks=2, microbatches=4)),
    Right("zb-v", LINEARS, replace(PP, schedule="zb-v", microbatches=4)),
    Right("sgd", SHARED, FULL, replace(RESUMED, optimizer=_sgd)),
    Right("rmsprop", SHARED, PP, replace(RESUMED, optimizer=_rmsprop)),
    Right("amsgrad", SHARED, replace(DP, strategy="optimizer"), replace(RESUMED, optimizer=_amsgrad)),
    Right("muon of joined linears", NORMS, TP, replace(RESUMED, optimizer=_muon)),
    Right("muon of experts", sparse_llama(layers=1), replace(FULL, ep=2), replace(RESUMED, optimizer=_muon)),
    Right("muon bf16", cases.LLAMA, replace(FULL, tp=2, **BF16), replace(NATIVE, optimizer=_muon)),
    Right("adafactor of owners", cases.LLAMA, replace(FULL, tp=2), replace(RESUMED, optimizer=_adafactor)),
    Right("five steps", SHARED, DP, replace(RESUMED, steps=5, clip=0.01)),
    Right("isolate", SHARED, DP, replace(RESUMED, isolate=True)),
    Right("lora dropping", ADAPTED_AND_DROPPING, TP),
    Right("lora full", ADAPTED, replace(FULL, pp=2)),
    Right("norms", NORMS, TP),
    Right("packed graphs", PACKED, replace(CP, compile="graphs")),
    Right("packed loss rows", PACKED, replace(TP, loss_rows=3)),
    Right("both sides", mixing(7, causal=False, kv_heads=2), Plan(cp=4, context_layout="striped")),
    Right("packed window", packed(mixing(8, window=3), 8), replace(CP, pp=2)),
    Right("reduced in bf16", cases.GPT2, replace(DP, precision="fp32", reduce_precision="bf16"), NATIVE),
    Right("packed bf16", PACKED, replace(CP, **BF16), NATIVE),
    Right("bf16 alone", cases.LLAMA, replace(TP, precision="bf16"), NATIVE),
    Right("packed exact", PACKED, CP, EXACT),
    Right("window exact", mixing(8, window=3), TWO, EXACT),
)
MIXTURES = (
    Right("one expert", sparse_llama(layers=1, experts=1, top_k=1), FULL),
    Right("one expert a token", sparse_llama(top_k=1, shared=0), replace(PP, schedule="zb-h1")),
    Right("all experts a token", sparse_llama(layers=1, experts=3, top_k=3), replace(KEEP, dp=2, ep=2)),
    Right("groups and corrections cp", CORRECTED, replace(CP, tp=2)),
    Right("groups and corrections", CORRECTED, replace(FULL, ep=2)),
    Right("groups and corrections keep", CORRECTED, replace(KEEP, recompute="full")),
    Right("experts without tokens", sparse_llama(layers=1, experts=64), replace(FULL, ep=2)),
    Right("ranks without experts", sparse_llama(layers=1, experts=3), replace(FULL, dp=4, ep=4)),
    Right("experts cut", sparse_llama(layers=1), replace(TP, etp=2, recompute="selective")),
    Right("experts over tp and dp", sparse_llama(layers=1), replace(TP, dp=2, ep=4)),
    Right("experts cp", sparse_llama(layers=1), replace(CP, ep=2, strategy="optimizer", dp=2)),
    Right("experts fp32", sparse_llama(layers=1), replace(TP, precision="fp32"), NATIVE),
    Right("experts bf16", sparse_llama(layers=1), replace(FULL, **BF16), NATIVE),
    Right("divided experts bf16", sparse_llama(layers=1), replace(FULL, ep=2, **BF16), NATIVE),
    Right("divided experts fp16", sparse_llama(layers=1), replace(DP, ep=2, **FP16), NATIVE),
)
"""Mixtures of experts."""
