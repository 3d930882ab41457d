"""Draws demo.svg: one step of `make demo` (examples/demo.toml), a row for each of its four ranks.

.venv/bin/python docs/pictures/demo.py
"""

from pathlib import Path

import plait
from plait.app.config.config_parser import config_from_arguments
from plait.pictures.timelines.svg import draw_svg
from plait.pictures.timelines.timeline import simulate

FOLDER = Path(__file__).parent
plan = config_from_arguments(["--config", str(FOLDER.parents[1] / "examples" / "demo.toml")]).plan()
timeline = simulate(
    plait.schedule(plan.schedule, ranks=plan.pp, microbatches=plan.microbatches), plait.Costs(F=1, I=1, W=1)
)
rows = [(f"rank {stage * plan.tp + tp}", stage) for stage in range(plan.pp) for tp in range(plan.tp)]
name = (
    f"{plan.schedule}: {plan.pp} stages × {plan.tp} tensor-parallel ranks, {plan.microbatches} micro-batches"
)
(FOLDER / "demo.svg").write_text(draw_svg(timeline, name=name, rows=rows))
