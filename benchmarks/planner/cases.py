"""The published runs of `published.json` as models, plans and frameworks that `plait.predict` takes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plait.plan import Plan
from plait.prediction.decoder import Decoder
from plait.prediction.framework import Framework
from plait.prediction.hardware import Hardware, load_hardware
from plait.prediction.memory_by_size import predicted_memory
from plait.prediction.quick_step import quick_step
from plait.prediction.step_prediction import Prediction, predict
from plait.prediction.step_times import StepTimes
from plait.schedules.search.api import schedule
from plait.schedules.stage_cuts.balance import balance

FOLDER = Path(__file__).parent
MEGATRON_2021 = Framework(
    fused_attention=False,
    attention_dropout=True,
    layer_by_layer=True,
    overlaps_tensor_sums=False,
    overlaps_data_sums=False,
    blocking_messages=True,
    messages_divided=True,
)
"""Megatron-LM of 2021 and 2022, and DeepSpeed's pipelines around it: no flash attention, no overlap."""
DEEPSPEED = MEGATRON_2021
FSDP = Framework(layer_by_layer=True, overlaps_tensor_sums=False)
MEGATRON_CORE = Framework(
    layer_by_layer=True,
    overlaps_tensor_sums=False,
    overlaps_data_sums=False,
    blocking_messages=True,
    fused_loss=True,
    fused_gate=True,
    placeholder_gradients=True,
)
MIXED = {"precision": "fp16", "master_precision": "fp32", "gradient_precision": "fp16"}
MIXED_32 = {"precision": "bf16", "master_precision": "fp32"}


HOST, INSIDE = 76e-6, 0.21
"""Seconds to start an operation and efficiency of links of vTrain's single hosts: fitted by fit.py."""
TRITON = {"attention": 0.205, "attention_backward": 0.164}
"""Efficiency of attention in llm-foundry on H100: fitted likewise."""
JEAN_ZAY = 0.22
"""Efficiency of Jean Zay's network: fitted likewise."""


@dataclass(frozen=True)
class Setup:
    """A model and a plan as a published run had them."""

    model: Decoder
    plan: Plan
    rows: int
    cluster: str
    framework: Framework

    def predict(self, machines: Mapping[str, Hardware]) -> Prediction:
        """Return the prediction of all actions."""
        return predict(
            self.model, self.plan, machines[self.cluster], rows=self.rows, framework=self.framework
        )

    def step_seconds(self, machines: Mapping[str, Hardware]) -> float:
        """Return the step time alone, as the search for plans computes it."""
        return self.step(machines).seconds

    def step(self, machines: Mapping[str, Hardware]) -> StepTimes:
        """Return the times of which the step consists."""
        cut = self.plan.layers_per_stage or (len(self.model.kinds),)
        return quick_step(self.model, self.plan, cut, self.rows, self.framework, machines[self.cluster])


@dataclass(frozen=True)
class Case:
    """One published run: what is predicted, and what was measured."""

    table: str
    measured: float
    """Step seconds."""
    setups: tuple[Setup, ...]
    """The fastest counts, where the micro-batch size is not published: the authors took the best."""
    bytes: float | None = None
    """Measured peak bytes of a device."""

    def predict(self, machines: Mapping[str, Hardware]) -> Prediction:
        """Return the prediction of the fastest setup."""
        return min((one.predict(machines) for one in self.setups), key=lambda found: found.step_seconds)

    def allocated(self, machines: Mapping[str, Hardware]) -> float:
        """Return the largest allocated bytes of a rank."""
        setup = self.setups[0]
        step = setup.step(machines)
        order = schedule(
            setup.plan.schedule,
            ranks=setup.plan.pp,
            microbatches=min(setup.plan.microbatches, 4 * setup.plan.pp),
            chunks=setup.plan.chunks,
        )
        found = predicted_memory(step.timer.shape, order, step.stages, step.modes, 0.0)
        return max(rank.allocated for rank in found)

    def step_seconds(self, machines: Mapping[str, Hardware]) -> float:
        """Return the step time of the fastest setup."""
        return min(one.step_seconds(machines) for one in self.setups)


def tables() -> dict[str, Any]:
    """Return the published tables by name."""
    return json.loads((FOLDER / "published.json").read_text())


def records(table: str, part: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a part, `fit` or `judge`, of a table."""
    found = tables()[table]
    for row in found[part]:
        yield dict(zip(found["columns"], row, strict=True))


def clusters() -> dict[str, Hardware]:
    """Return the hardware of the published runs: bundled files, and what differs from them in a cluster."""
    a100 = load_hardware("a100-80")
    h100 = load_hardware("h100-sxm")
    slow = replace(a100.across, bandwidth=a100.across.bandwidth / 2)
    return {
        "a100-80": a100,
        "a100-40": load_hardware("a100-40"),
        "h100-sxm": load_hardware("h100-sxm"),
        "b200-sxm": load_hardware("b200-sxm"),
        # llm-foundry's attention of 2023, written in Triton, is slow on this device.
        "h100-triton": replace(h100, efficiency=replace(h100.efficiency, **TRITON)),
        # H100 of 96 GB: torchtitan's benchmark page.
        "h100-96": replace(
            load_hardware("h100-sxm"), name="h100-96", memory=95.0 * 2**30, memory_bandwidth=2.4e12
        ),
        # Jean Zay: four adapters of 100 Gb/s for eight devices.
        "jean-zay": replace(
            a100,
            name="jean-zay",
            across=replace(a100.across, bandwidth=6.25e9),
            efficiency=replace(a100.efficiency, across=JEAN_ZAY),
        ),
        # vTrain's configuration: 800 Gb/s a host; its single hosts are slow at starting operations.
        "vtrain": replace(a100, name="vtrain", across=slow),
        "vtrain-host": replace(a100, efficiency=replace(a100.efficiency, host=HOST, inside=INSIDE)),
    }


def cases(part: str) -> list[Case]:
    """Return the runs of a part, `fit` or `judge`, whose step time is predicted."""
    return [
        maker(table, row)
        for table, maker in MAKERS.items()
        for row in records(table, part)
        if row.get("step_seconds", 1) is not None
    ]


def gpt(row: Mapping[str, Any], **more: Any) -> Decoder:
    """Return the sizes of a GPT."""
    sizes = {name: row[name] for name in ("hidden", "layers", "heads", "context")}
    return Decoder(vocab=row.get("vocab") or 51200, biases=True, positions=True, tied=True, **sizes, **more)


def even_blocks(model: Decoder, stages: int) -> tuple[int, ...]:
    """Return layers per stage: whole blocks divided evenly, the embedding first and the head last."""
    counts = balance([1.0] * model.layers, stages)
    layers = [2 * count for count in counts]
    layers[0] += 1
    layers[-1] += 1
    return tuple(layers)


def megatron(table: str, row: Mapping[str, Any]) -> Case:
    """Tables 1 and 2 of Narayanan et al. 2021: full recomputation, interleaved where possible."""
    model = gpt(row)
    rate = 96 * row["batch"] * row["context"] * model.layers * model.hidden**2
    rate *= 1 + row["context"] / 6 / model.hidden + model.vocab / 16 / model.layers / model.hidden
    ranks = row["tp"] * row["pp"] * row["dp"]

    sizes = [row["rows"]] if row.get("rows") else [1, 2, 4, 8]
    maker = _zero3 if row.get("strategy") == "zero3" else _megatron
    setups = [maker(model, row, size) for size in sizes if row["batch"] // row["dp"] % size == 0]
    return Case(table, rate / ranks / row["teraflops"] / 1e12, tuple(setups))


def _megatron(model: Decoder, row: Mapping[str, Any], size: int) -> Setup:
    per_rank = row["batch"] // row["dp"]
    blocks = model.layers // row["pp"]
    count = per_rank // size
    chunks = next((n for n in (2, 3) if blocks % n == 0), 1) if row["pp"] > 1 and count >= row["pp"] else 1
    plan = Plan(
        tp=row["tp"],
        pp=row["pp"],
        dp=row["dp"],
        microbatches=count,
        schedule="interleaved" if chunks > 1 else "1f1b",
        chunks=chunks,
        recompute="full",
        layers_per_stage=even_blocks(model, row["pp"] * chunks),
        **MIXED,
    )
    return Setup(model, plan, per_rank, "a100-80", MEGATRON_2021)


def _zero3(model: Decoder, row: Mapping[str, Any], size: int) -> Setup:
    per_rank = row["batch"] // row["dp"]
    plan = Plan(
        dp=row["dp"],
        microbatches=per_rank // size,
        strategy="full",
        reduce="each",
        recompute="full",
        **MIXED,
    )
    return Setup(model, plan, per_rank, "a100-80", DEEPSPEED)


def megascale(table: str, row: Mapping[str, Any]) -> Case:
    """Rows of Megatron-LM in table 2 of Jiang et al. 2024; flash attention, ZeRO-2, micro-batches of one."""
    model = gpt(row)
    per_rank = row["batch"] // row["dp"]
    plan = Plan(
        tp=row["tp"],
        pp=row["pp"],
        dp=row["dp"],
        microbatches=per_rank,
        schedule="interleaved",
        chunks=row["chunks"],
        strategy="optimizer",
        sequence_parallel="regather",
        layers_per_stage=even_blocks(model, row["pp"] * row["chunks"]),
        **MIXED_32,
    )
    framework = replace(MEGATRON_CORE, fused_loss=False)
    return Case(
        table,
        row["step_seconds"],
        (Setup(model, plan, per_rank, "a100-80", framework),),
    )


def deepspeed(table: str, row: Mapping[str, Any]) -> Case:
    """BigScience's and vTrain's runs: Megatron-DeepSpeed with 1F1B and full recomputation."""
    model = gpt(row)
    per_rank = row["batch"] // row["dp"]
    zero = table == "bigscience"
    plan = Plan(
        tp=row["tp"],
        pp=row["pp"],
        dp=row["dp"],
        microbatches=per_rank // row["rows"],
        strategy="optimizer" if zero else "none",
        recompute="full",
        layers_per_stage=even_blocks(model, row["pp"]),
        **(MIXED_32 if row.get("era", "").startswith("bf16") else MIXED),
    )
    cluster = "jean-zay" if zero else "vtrain" if "several" in table else "vtrain-host"
    return Case(
        table,
        row["step_seconds"] if zero else row["step_ms"] / 1e3,
        (Setup(model, plan, per_rank, cluster, DEEPSPEED),),
        row["gigabytes"] * 2.0**30 if row.get("gigabytes") else None,
    )


def zero_bubble(table: str, row: Mapping[str, Any]) -> Case:
    """Qi et al. 2024: pipelines of one host to four, no recomputation."""
    model = gpt(row)
    chunks = (model.layers + 2) // row["pp"] if row["schedule"] == "interleaved" else 1
    plan = Plan(
        pp=row["pp"],
        microbatches=row["microbatches"],
        schedule=row["schedule"],
        chunks=chunks,
        layers_per_stage=_zero_bubble_cut(model, row["pp"] * chunks),
        **MIXED,
    )
    framework = replace(MEGATRON_2021, blocking_messages=False)
    rows = row["rows"] * row["microbatches"]
    seconds = rows / row["samples_per_second_per_device"] / row["pp"]
    return Case(
        table,
        seconds,
        (Setup(model, plan, rows, "a100-80", framework),),
        row["peak_gb"] * 2.0**30,
    )


def _zero_bubble_cut(model: Decoder, stages: int) -> tuple[int, ...]:
    counts = balance([1.0] * (model.layers + 2), stages)
    layers = [2 * count for count in counts]
    layers[0] -= 1  # a block less, the embedding more
    layers[-1] -= 1
    return tuple(layers)


def llm_foundry(table: str, row: Mapping[str, Any]) -> Case:
    """MPT under FSDP: bf16, flash attention, gradients reduced for every micro-batch."""
    model = gpt(row)
    rows = row["rows"] * row["microbatches"]
    plan = Plan(
        dp=row["ranks"],
        microbatches=row["microbatches"],
        strategy="full",
        reduce="each",
        recompute=row["recompute"],
        **MIXED_32,
    )
    device = {"a100_40gb": "a100-40", "a100_80gb": "a100-80", "h100_80gb": "h100-triton"}[row["device"]]
    seconds = rows * model.context / row["tokens_per_second_per_device"]
    return Case(table, seconds, (Setup(model, plan, rows, device, FSDP),))


def torchtitan(table: str, row: Mapping[str, Any]) -> Case:
    """Llama 3 under FSDP2 with tensor, context and pipeline parallelism, compiled, partly in fp8."""
    sizes = {
        name: row[name] for name in ("hidden", "inner", "layers", "heads", "kv_heads", "context", "vocab")
    }
    model = Decoder(gated=True, rotary=True, **sizes)
    interleaved = row["schedule"] == "Interleaved 1F1B"
    plan = Plan(
        tp=row["tp"],
        pp=row["pp"],
        cp=row["cp"],
        dp=row["fsdp"],
        microbatches=row["rows"] if row["pp"] > 1 else 1,
        schedule="interleaved" if interleaved else "1f1b",
        chunks=2 if interleaved else None,
        layers_per_stage=even_blocks(model, row["pp"] * (2 if interleaved else 1)),
        strategy="full",
        recompute=row["recompute"],
        sequence_parallel="regather" if row["tp"] > 1 else "none",
        **MIXED_32,
    )
    framework = replace(
        FSDP,
        product_precision="fp8" if row["fp8"] else None,
        elementwise_passes=0.7 if row["compiled"] else 1.3,
        overlaps_tensor_products=row["async_tp"],
        frees_gathered=row["pp"] == 1,
    )
    tokens = row["rows"] * model.context / row["tp"] / row["pp"] / row["cp"]
    return Case(
        table,
        tokens / row["tokens_per_second_per_device"],
        (Setup(model, plan, row["rows"], "h100-96", framework),),
        row["peak_gib"] * 2.0**30,
    )


LLAMA_3 = {
    "llama3_70b": Decoder(
        layers=80,
        hidden=8192,
        heads=64,
        kv_heads=8,
        inner=28672,
        vocab=128256,
        context=8192,
        gated=True,
        rotary=True,
    ),
    "llama3_405b": Decoder(
        layers=126,
        hidden=16384,
        heads=128,
        kv_heads=16,
        inner=53248,
        vocab=128256,
        context=8192,
        gated=True,
        rotary=True,
    ),
}
"""Llama 3 as SimuMax configures it: 405B with 16 key heads."""


def simumax(table: str, row: Mapping[str, Any]) -> Case:
    """SimuMax's runs of Megatron-LM on a host of B200: some layers of Llama 3."""
    model = replace(LLAMA_3[row["model"]], layers=row["layers"], context=row["context"])
    plan = Plan(
        tp=row["tp"],
        pp=row["pp"],
        dp=row["dp"],
        cp=row["cp"],
        microbatches=row["microbatches"],
        strategy="optimizer",
        sequence_parallel="regather" if row["tp"] > 1 else "none",
        layers_per_stage=even_blocks(model, row["pp"]),
        **MIXED_32,
    )
    return Case(
        table,
        row["step_ms"] / 1e3,
        (Setup(model, plan, row["microbatches"], "b200-sxm", MEGATRON_CORE),),
        row["peak_gib"] * 2.0**30,
    )


MAKERS: dict[str, Callable[[str, Mapping[str, Any]], Case]] = {
    "megatron 2021, table 1": megatron,
    "megatron 2021, table 2": megatron,
    "torchtitan": torchtitan,
    "zero bubble, table 4": zero_bubble,
    "zero bubble, table 12": zero_bubble,
    "megascale": megascale,
    "llm-foundry": llm_foundry,
    "bigscience": deepspeed,
    "simumax": simumax,
    "vtrain, several hosts": deepspeed,
    "vtrain, one host": deepspeed,
}
