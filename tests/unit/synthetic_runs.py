"""Folders of runs as `plait train` writes them, without training: any plan, any number of steps."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from plait.app.config.config import Config
from plait.app.loop.describe_run import describe
from plait.engine.blueprint import build_blueprint
from plait.models import llama
from plait.pictures.report.run_json import write_description
from plait.pictures.report.run_record import write_event
from plait.pictures.report.step_json import RecordedRank, RecordedStep, write_step
from plait.pictures.timelines.timeline import simulate
from plait.plan.axes import sizes_of_plan
from plait.schedules.costs import Costs
from plait.schedules.named_schedules import policy_schedule


def write_metrics(folder: Path, steps: int, seed: int = 0) -> list[dict[str, Any]]:
    """The metrics of a run that learns; returns the rows."""
    draw = random.Random(seed)
    rows = []
    for step in range(1, steps + 1):
        seconds = 0.1 + 0.02 * draw.random()
        row: dict[str, Any] = {
            "step": step,
            "loss": 2 + 5 / math.sqrt(step) + 0.1 * draw.gauss(0, 1),
            "grad_norm": 1 + draw.random(),
            "lr": 1e-3 * min(1, step / 100),
            "tokens": 65536,
            "step_seconds": seconds,
            "tokens_per_second": 65536 / seconds,
            "peak_memory_bytes": 1_000_000_000 + step,
        }
        if step % max(steps // 10, 1) == 0:
            row["validation_loss"] = row["loss"] + 0.1
        rows.append(row)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def write_experts(folder: Path, steps: int, routers: int = 2, experts: int = 4) -> None:
    """The tokens of each expert in each step; the last expert of each router has none."""
    draw = random.Random(2)
    with (folder / "experts.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            tokens = {
                f"blocks.{number}.router": [draw.randint(50, 150) for _ in range(experts - 1)] + [0]
                for number in range(routers)
            }
            row = {"step": step, "tokens": tokens, "sent": [2 * step, 30], "received": [20, 4 * step]}
            file.write(json.dumps(row) + "\n")


def write_ranks(folder: Path, rows: list[dict[str, Any]], world: int, slow: int | None = None) -> None:
    """The series of each rank; `slow` is blocked for less time than the others, which wait for it."""
    draw = random.Random(1)
    with (folder / "ranks.jsonl").open("w") as file:
        for row in rows:
            part = [0.1 if rank == slow else 0.5 + 0.05 * draw.random() for rank in range(world)]
            blocked = [round(row["step_seconds"] * one, 6) for one in part]
            memory = [900_000_000 + rank for rank in range(world)]
            file.write(
                json.dumps({"step": row["step"], "blocked_seconds": blocked, "peak_memory_bytes": memory})
                + "\n"
            )


def write_plan(folder: Path, layers: int = 4, **parallel: Any) -> Config:
    """The configuration and description of a llama under a plan."""
    model = {"name": "llama", "layers": layers, "hidden": 256, "heads": 8, "inner": 512, "vocab": 1024}
    config = Config.model_validate(
        {
            "model": model,
            "train": {"batch": 64 * parallel.get("dp", 1), "microbatches": 8},
            "parallel": parallel,
            "run": {"dir": folder},
        }
    )
    plan = config.plan()
    built = llama(layers=layers, hidden=256, heads=8, inner=512, vocab=1024, context=128)
    mesh: Any = SimpleNamespace(
        sizes=sizes_of_plan(plan),
        device=torch.device("cpu"),
        world=plan.world,
        uses_nccl=False,
        group=lambda axis: SimpleNamespace(on_one_host=True),
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config.model_dump_json())
    engine: Any = SimpleNamespace(blueprint=build_blueprint(built, plan), mesh=mesh)
    write_description(describe(engine, folder.resolve().name, ("Model: llama.",)), folder)
    write_event(folder, "start", 0, "")
    return config


def write_recorded_step(folder: Path, ranks: int, pipelines: int, step: int = 10) -> RecordedStep:
    """A step of pipelines of `ranks` ranks each, one nanosecond later each, with waits over tp."""
    schedule = policy_schedule("1f1b", ranks, 8)
    timeline = simulate(schedule, Costs(1e6, 1e6, 1e6))
    every = []
    for rank in range(ranks):
        for pipeline in range(pipelines):
            actions = tuple(
                (
                    action.stage,
                    str(action.kind),
                    action.microbatch,
                    int(start) + pipeline,
                    int(end) + pipeline,
                )
                for action, start, end in timeline.events[rank]
            )
            blocked = tuple(("tp", start + 100_000, start + 300_000) for *_, start, _ in actions)
            every.append(
                RecordedRank(actions, blocked, {"tp": {"all_reduce": (len(actions), 1000 * len(actions))}})
            )
    record = RecordedStep(step, "1f1b", 8, tuple(schedule.rank_of), tuple(every))
    write_step(record, folder)
    return record
