"""What ranks tell each other, as text and back."""

from __future__ import annotations

import torch

from plait.engine.resharding.rank_report import RankReport
from plait.plan.plan import Plan


def test_a_report_is_the_same_after_it_was_text() -> None:
    plan = Plan(pp=2, microbatches=2, recompute=("none", "full"), layers_per_stage=(1, 1), memory_limit=2.5)
    report = RankReport(
        1, plan, {"passes": 3}, 7, {"0": [1, 2]}, {"model.w": [2, 3]}, {"model.w": "bfloat16"}
    )
    again = RankReport.from_text(report.to_text())
    assert again == RankReport(**{**vars(report), "optimizers": [], "classes": []})
    assert again.dtype_of("w") == torch.bfloat16
    assert RankReport.from_text(RankReport(classes=["SGD"]).to_text()).plan is None
