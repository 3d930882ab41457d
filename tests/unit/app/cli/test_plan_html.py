"""`plait plan --html`: the page of a search, and that of one plan."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path

import pytest
from chromium import CHROMIUM, run_page

from plait.app.cli.main import main

SMALL = ["--hardware", "h100-sxm", "--model.layers", "2", "--train.batch", "4", "--train.precision", "bf16"]
PIPELINE = [*SMALL, "--parallel.pp", "2", "--train.microbatches", "4", "--parallel.recompute", "full"]


def _page(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    """Return the page, and what the command printed."""
    file = folder / "plan.html"
    assert main(["plan", *arguments, "--html", str(file)]) == 0
    return file.read_text(encoding="utf-8"), capsys.readouterr().out


def _points(page: str) -> list[str]:
    return [unescape(one) for one in re.findall(r'<g class="point".*?<title>(.*?)</title>', page, re.S)]


def test_the_page_of_a_search_has_its_plans_and_says_how_many_are_not_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, printed = _page(tmp_path, capsys, *SMALL, "--ranks", "2", "--most", "3")
    head, fastest = printed.splitlines()[:2]
    assert printed.splitlines()[-1].startswith("wrote ")
    plans = int(re.search(r"Of ([\d,]+) plans", printed)[1].replace(",", ""))  # type: ignore[index]
    told = re.search(r"([\d,]+) of ([\d,]+) plans are drawn.*?The other ([\d,]+) were", page)
    assert told is not None
    drawn, whole, others = (int(number.replace(",", "")) for number in told.groups())
    assert whole == plans == drawn + others
    points = _points(page)
    hidden = sum(int(one.rsplit("and ", 1)[1].split()[0]) for one in points if one.endswith(" more here"))
    assert len(points) + hidden == drawn > 3
    assert f"step: {' '.join(fastest.split()[:2])}\n" in points[-1]  # drawn over the others
    assert page.count('class="frontier"') == page.count('class="limit"') == 1
    assert page.count("<tr class=differs>") == 1
    assert all(column in page for column in head.split())
    assert not re.search(r"(src|href)=", page)


def test_the_page_of_one_plan_has_its_changes_and_its_timeline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, printed = _page(tmp_path, capsys, *PIPELINE, "--mtbf", "1000")
    changes = [line.split()[0] for line in printed.splitlines() if line.startswith("  ")]
    assert len(changes) == 3
    assert all(f"<td>{field} = " in page for field in changes)
    assert len(_points(page)) == 4
    assert 'class="frontier"' not in page
    assert "1f1b, 4 micro-batches" in page
    assert "of the time is progress" in page
    element = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert element is not None
    data = json.loads(element[1])
    assert (data["labels"], data["timeUnit"], data["microbatches"]) == (["rank 0", "rank 1"], "ms", 4)
    number, unit = printed.split()[1:3]
    step = float(number) * {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[unit.rstrip(",")]
    assert 0.5 * step < data["length"] * data["tick"] / 1e3 <= step
    told = re.match(
        r"step +(\S+) ms, (\S+) tokens/s on 2 ranks, MFU (\S+),.*\nmemory +(.*?) allocated", printed
    )
    assert told is not None
    assert re.findall(r'<div title="(.*?)"><dt>(.*?)</dt><dd>(.*?)</dd></div>', page) == [
        ("predicted", "time of a step", f"{float(told[1]):.3g} ms"),
        ("of all ranks together", "tokens/s", told[2]),
        ("model FLOPs utilisation", "MFU", told[3]),
        ("of the rank with most", "memory", told[4]),
        ("", "pp × tp × cp × dp", "2 × 1 × 1 × 1"),
    ]
    uses = re.findall(r"<td>([^<]+)</td><td><span.*?width: (\S+)%.*?<td class=number>(\S+ \S+?)</td>", page)
    parts = re.findall(r"^([a-z][a-z -]+?)  +([\d.]+ \S+)  +([\d.]+)%$", printed, re.M)
    assert sorted(name for name, _, _ in uses) == sorted(name for name, _, _ in parts)
    assert [float(share) for _, share, _ in uses] == sorted(
        (float(share) for _, share, _ in uses), reverse=True
    )
    for name, share, time in uses:
        its_time, its_share = next(rest for other, *rest in parts if other == name)
        assert float(share) == pytest.approx(float(its_share), abs=0.06)
        assert float(time.split()[0]) == pytest.approx(float(its_time.split()[0]), rel=6e-3)


@pytest.mark.full
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_the_page_draws_its_timeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, _ = _page(tmp_path, capsys, *PIPELINE)
    script = """
    const wide = document.documentElement.scrollWidth > innerWidth;
    return {shown: shown(), wide, colour: pixel(base, xOf(0) + 3, rowTop(0) + 5)};
    """
    told = run_page(page, script, tmp_path)
    assert told["faults"] == []
    assert told["shown"].endswith(" ms")
    assert not told["wide"]
    assert told["colour"]
