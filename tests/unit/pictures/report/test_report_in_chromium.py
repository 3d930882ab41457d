"""The report, alive in a headless Chromium: what it shows, and what pointing and zooming do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chromium import CHROMIUM, run_page
from synthetic_runs import write_metrics, write_plan, write_ranks, write_recorded_step

from plait.pictures.report.page import draw_report, read_runs
from plait.pictures.report.run_record import read_run

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium"),
]

CHARTS = """
const legend = (plot) => [...plot.root.querySelectorAll('.u-legend .u-value')].map((one) => one.textContent);
const range = (plot) => [plot.scales.x.min, plot.scales.x.max];
const over = (plot) => plot.root.querySelector('.u-over');
async function at(plot, kind, step) {
  const box = over(plot).getBoundingClientRect(), x = plot.valToPos(step, 'x');
  over(plot).dispatchEvent(new MouseEvent(kind, {
    clientX: box.left + x, clientY: box.top + box.height / 2, bubbles: true, button: 0, detail: 1}));
  await pause(60);
}
const numbers = {};
for (const plot of plots) plot.root.scrollIntoView();
scrollTo(0, 0);
"""


def test_pointing_at_a_chart_shows_a_steps_numbers_and_zooming_zooms_all_charts(tmp_path: Path) -> None:
    write_plan(tmp_path, pp=2, tp=2)
    config = json.loads((tmp_path / "config.json").read_text())
    config["train"]["clip"] = 100
    (tmp_path / "config.json").write_text(json.dumps(config))
    rows = write_metrics(tmp_path, 40)
    write_ranks(tmp_path, rows, 4)
    write_recorded_step(tmp_path, 2, 2)
    script = """
    const told = {atRest: legend(plots[0])};
    await at(plots[0], 'mousemove', 8);
    told.pointed = plots.slice(0, 5).map(legend);
    await at(plots[0], 'mouseleave', 8);
    told.clip = plots[1].scales.y.max;
    told.memory = plots[5].scales.y.min;
    plots[0].setScale('x', {min: 10, max: 20});
    await pause(60);
    told.zoomed = plots.map(range);
    await at(plots[1], 'dblclick', 12);
    await pause(60);
    told.whole = plots.map(range);
    document.querySelector('.log').click();
    await pause(40);
    told.logarithmic = plots[0].scales.y.distr;
    return told;
    """
    told = run_page(draw_report([read_run(tmp_path)]), CHARTS + script, tmp_path, drawn="drawn[0]")
    assert told["faults"] == []
    assert [float(text) for text in told["atRest"]] == pytest.approx(
        [40, rows[-1]["loss"], rows[-1]["validation_loss"]], rel=1e-5
    )
    loss, norm, rate, speed, seconds = told["pointed"]
    row = rows[7]
    assert [float(text) for text in loss] == pytest.approx([8, row["loss"], row["validation_loss"]], rel=1e-5)
    assert [float(text) for text in norm[:2]] == pytest.approx([8, row["grad_norm"]], rel=1e-5)
    assert [float(text) for text in rate] == pytest.approx([8, row["lr"]], rel=1e-5)
    assert [float(text) for text in speed] == pytest.approx([8, row["tokens_per_second"]], rel=1e-5)
    assert seconds == ["8", f"{row['step_seconds'] * 1e3:.6g} ms"]
    assert told["zoomed"] == [[10, 20]] * len(told["zoomed"])
    assert all(shown[0] <= 1 and shown[1] >= 40 for shown in told["whole"])
    assert told["logarithmic"] == 3
    assert told["clip"] < 3  # the line at 100 does not squeeze the curve
    assert told["memory"] == 0


def test_timeline_rank_map_and_plan_show_cards_under_the_pointer(tmp_path: Path) -> None:
    write_plan(tmp_path, pp=2, tp=2, dp=2, strategy="full")
    rows = write_metrics(tmp_path, 40)
    write_ranks(tmp_path, rows, 8)
    write_recorded_step(tmp_path, 2, 4)
    script = """
    const told = {shown: shown()};
    const where = (time) => xOf(time / timeline.tick);
    await pointAt(where(0.5), rowTop(0) + 5);
    told.action = card();
    await pointAt(where(0.2), rowTop(0) + layout.rowHeight + 3);
    told.wait = card();
    await turn(where(0.5), rowTop(0) + 5, -400);
    told.zoomed = shown() !== told.shown;
    const map = plots.at(-1);
    await at(map, 'mousemove', 5);
    told.map = document.querySelector('.rank-map p').textContent;
    const rank = document.querySelector('.rank[data-rank="5"]');
    rank.dispatchEvent(new PointerEvent('pointerover', {bubbles: true}));
    told.place = document.querySelector('.place').textContent;
    told.held = [...document.querySelectorAll('.tensor:first-child .held')].map((one) => ({...one.dataset}));
    return told;
    """
    told = run_page(draw_report([read_run(tmp_path)]), CHARTS + script, tmp_path, drawn="drawn[0]")
    assert told["faults"] == []
    assert told["shown"] == "shown: 0 to 27 of 27 ms"
    assert told["action"].startswith(
        "0F0  forward; stage 0, on rank 0; micro-batch 0; start 0 ms; end 1 ms; "
    )
    assert told["action"].endswith("blocked, tp 0.2 ms")
    assert told["wait"] == (
        "rank 0 is blocked in communication over tp; from 0.1 ms; to 0.3 ms; duration 0.2 ms"
    )
    assert told["zoomed"]
    assert told["map"].startswith("rank ")
    assert ", step 5: busy time of a step " in told["map"]
    assert told["place"] == (
        "rank 5: along pp with ranks 1, 5; along shard with ranks 5, 7; along tp with ranks 4, 5"
    )
    assert {(one.get("shard", "0"), one["tp"]) for one in told["held"]} == {("0", "1")}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_pages_of_died_runs_and_of_several_runs_raise_no_script_error(tmp_path: Path, count: int) -> None:
    paths = [tmp_path / str(number) for number in range(count)]
    for number, path in enumerate(paths):
        write_metrics(path, 1 + 250 * number)
    script = CHARTS + "await pause(60); return {count: plots.length, ranges: plots.map(range)};"
    told = run_page(draw_report(read_runs(paths)), script, tmp_path, drawn="{}")
    assert told["faults"] == []
    assert told["count"] == 6
    assert told["ranges"] == [[0, 2] if count == 1 else [1, 1 + 250 * (count - 1)]] * 6


def test_the_map_of_a_short_run_hides_no_steps_of_a_long_one(tmp_path: Path) -> None:
    paths = [tmp_path / "short", tmp_path / "long"]
    for path, steps in zip(paths, (40, 60), strict=True):
        write_plan(path, pp=2)
        write_ranks(path, write_metrics(path, steps), 2)
    script = CHARTS + "await pause(60); return {ranges: plots.map(range)};"
    told = run_page(draw_report(read_runs(paths)), script, tmp_path, drawn="{}")
    assert told["faults"] == []
    assert told["ranges"] == [[1, 60]] * 8
