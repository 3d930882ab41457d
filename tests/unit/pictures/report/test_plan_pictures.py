"""Pictures of a plan: each rank, layer and shard has its place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from synthetic_runs import write_plan

from plait.pictures.report.plan_pictures import layers_picture, ranks_picture, tensor_picture, tensor_text
from plait.pictures.report.run_json import read_description


@pytest.mark.parametrize(
    "parallel", [{"pp": 2, "tp": 2, "dp": 2, "cp": 2}, {"pp": 8, "tp": 8, "dp": 8, "replicate": 2}], ids=str
)
def test_every_rank_and_layer_has_a_place_in_the_plan_picture(
    tmp_path: Path, parallel: dict[str, int]
) -> None:
    write_plan(tmp_path, layers=8, strategy="full", **parallel)
    about = read_description(tmp_path)
    assert about is not None
    picture = ranks_picture(about)
    ranks = re.findall(r'data-rank="(\d+)" data-pp="(\d+)"', picture)
    assert [int(rank) for rank, _ in ranks] == list(range(about.world))
    assert all(int(rank) // (about.world // about.mesh["pp"]) == int(pp) for rank, pp in ranks)
    assert layers_picture(about).count("<rect") == len(about.layers)
    right = max(
        float(x) + float(w) for x, w in re.findall(r' x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', picture)
    )
    assert right <= 1151


def test_the_picture_of_a_sharded_matrix_covers_it_once(tmp_path: Path) -> None:
    write_plan(tmp_path, tp=2, dp=2, cp=2, strategy="full")
    about = read_description(tmp_path)
    assert about is not None
    for tensor in about.tensors:
        picture = tensor_picture(tensor, about.mesh)
        width, height = map(float, re.findall(r'width="([\d.]+)" height="([\d.]+)" role', picture)[0])
        sizes = {
            kind: sum(
                float(w) * float(h)
                for w, h in re.findall(rf'class="{kind}"[^>]* width="([\d.]+)" height="([\d.]+)"', picture)
            )
            for kind in ("shard", "interval")
        }
        whole = (width - 2) * (height - 2)
        assert sizes["shard"] == pytest.approx(whole, rel=0.04), tensor.name
        assert sizes["interval"] == pytest.approx(whole, rel=0.04), tensor.name
    (up,) = (tensor for tensor in about.tensors if tensor.name == "blocks.0.mlp.gate.weight")
    assert tensor_text(up, about).startswith("512 × 256, divided over tp 2 × shard 2 × cp 2: at most ")
