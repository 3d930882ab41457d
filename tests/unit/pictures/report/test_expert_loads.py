"""The maps of the load of experts in a report."""

from __future__ import annotations

import json
from pathlib import Path

from synthetic_runs import write_experts, write_metrics

from plait.pictures.report.expert_loads import ExpertLoads, read_expert_loads
from plait.pictures.report.page import draw_report, read_runs


def test_loads_are_multiples_of_the_mean_of_the_layer(tmp_path: Path) -> None:
    rows = [
        {"step": 1, "tokens": {"a": [3, 1, 0, 4], "b": [5]}, "sent": [1, 2], "received": [3, 0]},
        {"step": 2, "tokens": {"a": [0] * 4, "b": [1]}, "sent": [2, 4], "received": [6, 0]}
        | {"forced_routing": True},
    ]
    damaged = [
        "{",
        '{"step": 5, "tokens": {"a": [1, 1, 1, 1], "b": [1]}, "sent": [-1, 0]}',
        '{"step": 3, "tokens": {"a": [1]}}',
        '{"step": 4, "tokens": {}}',
    ]
    lines = [json.dumps(rows[0]), *damaged, json.dumps(rows[1])]
    (tmp_path / "experts.jsonl").write_text("\n".join(lines))
    loads = read_expert_loads(tmp_path)
    assert loads is not None
    assert loads.steps == (1, 2)
    assert loads.loads == {"a": ((1.5, 0.5, 0.0, 2.0), (0.0,) * 4), "b": ((1.0,), (1.0,))}
    assert (loads.sent, loads.received, loads.forced) == ((1.5, 3.0), (4.5, 0.0), 1)
    assert read_expert_loads(tmp_path / "nowhere") is None


def test_a_cell_is_the_lighter_the_more_tokens_its_expert_has() -> None:
    drawn = ExpertLoads((1, 2), {"blocks.0.router": ((0.0, 2.0), (0.0, 7.0))}).draw()
    dark, light = drawn.index("#00224e"), drawn.index("#fee838")
    assert drawn.count("<path") == 2
    assert dark < light
    assert drawn.count("M") == 4
    assert "blocks.0.router" in drawn


def test_of_many_routers_evenly_spaced_ones_are_drawn_and_of_many_steps_means() -> None:
    row = tuple(1.0 for _ in range(64))
    loads = ExpertLoads(tuple(range(500)), {f"blocks.{one}": (row,) * 500 for one in range(100)})
    assert (len(loads.shown), loads.shown[0], loads.shown[-1]) == (32, "blocks.0", "blocks.99")
    assert loads.draw().count("M") <= 60_000
    assert ExpertLoads((1,), {"only": ((1.0,),)}).shown == ["only"]


def test_the_report_of_a_run_with_experts_has_their_maps(tmp_path: Path) -> None:
    write_metrics(tmp_path / "run", 20)
    assert "Load of experts" not in draw_report(read_runs([tmp_path / "run"]))
    write_experts(tmp_path / "run", 20)
    page = draw_report(read_runs([tmp_path / "run"]))
    assert "Load of experts over the steps" in page
    assert "steps 1 to 20" in page
    assert "Routing was forced" not in page
    assert "<td>0</td><td class=number>21</td><td class=number>20</td>" in page, "means of 20 steps"


def test_the_report_says_that_routing_was_forced_and_shows_the_ranks_that_send_most(tmp_path: Path) -> None:
    write_metrics(tmp_path / "run", 1)
    row = {"step": 1, "tokens": {"router": [1, 1]}, "sent": [*range(40)], "received": [0] * 40}
    (tmp_path / "run" / "experts.jsonl").write_text(json.dumps(row | {"forced_routing": True}))
    page = draw_report(read_runs([tmp_path / "run"]))
    assert "Routing was forced to be balanced" in page
    assert "The 16 of 40 ranks with most" in page
    assert "<td>39</td>" in page
    assert "<td>23</td>" not in page
