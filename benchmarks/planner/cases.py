"""The published runs of `published.json` as models, plans and frameworks that `plait.predict` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from frameworks import (
    DEEPSPEED,
    DEEPSPEED_BF16,
    FSDP,
    LLAMA_3_FSDP,
    LLM_FOUNDRY,
    MEGATRON_2021,
    MEGATRON_2022,
    MEGATRON_CORE,
    MIXED,
    MIXED_32,
)
from runs import Case, Setup, even_blocks, gpt, records

from plait.plan.decoder_sizes import Decoder
from plait.plan.plan import Plan, Recompute
from plait.schedules.search.stage_cuts import balance


def cases(part: str) -> list[Case]:
    """Return the runs of a part, `fit` or `judge`, that did not run out of memory."""
    return [case for case in attempts(part) if case.measured is not None]


def attempts(part: str) -> list[Case]:
    """Return the runs of a part, `fit` or `judge`."""
    return [maker(table, row) for table, maker in MAKERS.items() for row in records(table, part)]


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


def selective(table: str, row: Mapping[str, Any]) -> Case:
    """Table 5 of Korthikanti et al. 2022: full recomputation, or selective with sequence parallelism."""
    model, chunks = gpt(row), row["chunks"]
    parts = row["variant"] == "selective+sp"
    plan = Plan(
        tp=row["tp"],
        pp=row["pp"],
        microbatches=row["batch"] // row["rows"],
        schedule="interleaved" if chunks > 1 else "1f1b",
        chunks=chunks,
        recompute="selective" if parts else "full",
        sequence_parallel="regather" if parts else "none",
        layers_per_stage=even_blocks(model, row["pp"] * chunks),
        **MIXED,
    )
    return Case(table, row["step_seconds"], (Setup(model, plan, row["batch"], "a100-80", MEGATRON_2022),))


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
    model, zero = gpt(row), table == "bigscience"
    per_rank = row["batch"] // row["dp"]
    bf16 = row.get("era", "").startswith("bf16")
    cut = even_blocks(model, row["pp"])
    several = table == "vtrain, several hosts" and row["pp"] > 1
    modes: list[Any] = [_all_but_last(cut), "full"] if several else ["full"]
    plans = [
        Plan(
            tp=row["tp"],
            pp=row["pp"],
            dp=row["dp"],
            microbatches=per_rank // row["rows"],
            strategy="optimizer" if zero else "none",
            recompute=mode,
            layers_per_stage=cut,
            **(MIXED_32 if bf16 else MIXED),
        )
        for mode in modes
    ]
    cluster = "jean-zay" if zero else "vtrain" if "several" in table else "vtrain-host"
    framework = DEEPSPEED_BF16 if bf16 else DEEPSPEED
    return Case(
        table,
        row["step_seconds"] if zero else row["step_ms"] / 1e3,
        tuple(Setup(model, plan, per_rank, cluster, framework) for plan in plans),
        row["gigabytes"] * 2.0**30 if row.get("gigabytes") else None,
        counts_reserved=zero,
    )


def _all_but_last(cut: tuple[int, ...]) -> tuple[Recompute, ...]:
    """Return the recomputation of vTrain's pipelines, whose last stage "doesn't perform recomputation"
    (VIA-Research/vTrain, src/predictor.py): its backward follows its forward. Where that would not fit, its
    runs must have recomputed it too."""
    return ("full",) * sum(cut[:-1]) + ("none",) * cut[-1]


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
    return Case(table, seconds, (Setup(model, plan, rows, device, LLM_FOUNDRY),))


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
        context_parallel="ring",
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


def llama_3(table: str, row: Mapping[str, Any]) -> Case:
    """Table 4 of Grattafiori et al. 2024: 405B, gradients and optimizer state sharded, 8 chunks a rank.

    A layer less on the first and on the last stage leaves 128 chunks of one block, the embedding, or the
    head (section 3.3.2). The operations behind the printed rates are taken as six for each parameter, and
    attention's for the half that the mask leaves.
    """
    model = replace(LLAMA_3["llama3_405b"], context=row["context"], kv_heads=8)
    plan = Plan(
        tp=row["tp"],
        pp=row["pp"],
        cp=row["cp"],
        context_parallel="ring",
        dp=row["dp"],
        microbatches=row["rows"],
        schedule="interleaved",
        chunks=8,
        strategy="gradients",
        sequence_parallel="regather",
        layers_per_stage=(1, *(2,) * model.layers, 1),
        **MIXED_32,
    )
    attention = 6 * model.layers * model.hidden * model.context
    needed = (6 * model.total_parameters + attention) * row["rows"] * model.context
    seconds = needed * row["dp"] / plan.world / row["teraflops"] / 1e12
    return Case(table, seconds, (Setup(model, plan, row["rows"], "h100-sxm", LLAMA_3_FSDP),))


def simumax(table: str, row: Mapping[str, Any]) -> Case:
    """SimuMax's runs of Megatron-LM on a host of B200: some layers of Llama 3."""
    model = replace(LLAMA_3[row["model"]], layers=row["layers"], context=row["context"])
    plan = Plan(
        tp=row["tp"],
        pp=row["pp"],
        dp=row["dp"],
        cp=row["cp"],
        context_parallel="ring",
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
    "llama 3": llama_3,
    "zero bubble, table 4": zero_bubble,
    "zero bubble, table 12": zero_bubble,
    "megatron 2022, table 5": selective,
    "megascale": megascale,
    "llm-foundry": llm_foundry,
    "bigscience": deepspeed,
    "simumax": simumax,
    "vtrain, several hosts": deepspeed,
    "vtrain, one host": deepspeed,
}
