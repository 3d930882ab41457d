"""Draws a picture of each policy, for docs/concepts/schedules.md: four ranks, eight micro-batches, no hops.

.venv/bin/python docs/pictures/schedules.py
"""

from pathlib import Path

import plait
from plait.pictures.timelines.svg import draw_svg
from plait.schedules.search.schedule_by_policy import POLICY_NAMES

FOLDER = Path(__file__).parent
for policy in POLICY_NAMES:
    timeline = plait.simulate(plait.schedule(policy, ranks=4, microbatches=8))
    (FOLDER / f"{policy}.svg").write_text(draw_svg(timeline, width=900), encoding="utf-8")
    print(f"{policy}: makespan {timeline.makespan:g}, span {timeline.span:g}, peak {max(timeline.peak):g}")
