"""Text and errors over a group."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.errors import CommunicationError, MeshError
from plait.ranks import Mesh
from plait.ranks.text_collectives import (
    all_gather_text,
    broadcast_result,
    broadcast_text,
    first_nonempty_text,
)

CPU = torch.device("cpu")


def test_text_collectives_give_the_text_of_rank_0_and_of_all_ranks(thread_ranks: Any) -> None:
    def body() -> Any:
        mesh = Mesh(dp=3)
        group, rank = mesh.group("dp"), mesh.rank
        own = "" if rank == 0 else f"rank {rank}: {'äö' * rank}"
        return (
            broadcast_text(f"from {rank}, ä", group, CPU),
            broadcast_text("" if rank == 0 else "no", group, CPU),
            all_gather_text(own, group, CPU),
            first_nonempty_text(own, group, CPU),
            first_nonempty_text("", group, CPU),
        )

    texts = ["", "rank 1: äö", "rank 2: äöäö"]
    assert thread_ranks.run(body, ranks=3) == [("from 0, ä", "", texts, "rank 1: äö", "")] * 3


def test_rank_0_computes_a_result_or_an_error_for_all_ranks(thread_ranks: Any) -> None:
    def body() -> Any:
        mesh = Mesh(dp=3)
        group, calls = mesh.group("dp"), []

        def compute() -> str:
            calls.append(mesh.rank)
            return "found"

        def fail() -> str:
            raise OSError("the disk is gone")

        result = broadcast_result(compute, MeshError, group, CPU)
        with pytest.raises(MeshError, match="the disk is gone"):
            broadcast_result(fail, MeshError, group, CPU)
        with pytest.raises(CommunicationError, match=r"^$"):
            broadcast_result(lambda: (_ for _ in ()).throw(MeshError("")), CommunicationError, group, CPU)
        count = mesh.traffic.snapshot()["dp"]["broadcast"]
        return result, calls, count.calls, count.bytes

    sent = 8 * 3 + len("found") + len("the disk is gone") + 1
    expected = [("found", [0] if rank == 0 else [], 6, sent) for rank in range(3)]
    assert thread_ranks.run(body, ranks=3) == expected
