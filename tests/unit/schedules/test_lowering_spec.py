from __future__ import annotations

from plait.schedules.lowering.program import LayerIndex, LoweringSpec


def test_layers_have_the_units_that_they_use_and_the_last_is_that_of_the_last_stage() -> None:
    first, last = LayerIndex(0, 1), LayerIndex(1, 2)
    spec = LoweringSpec((2, 3), {"table": (LayerIndex(0, 0), last), "own": (last,), "other": (first,)})
    assert spec.last_layer == last
    assert spec.units_of_layers() == {
        LayerIndex(0, 0): ("table",),
        first: ("other",),
        last: ("table", "own"),
    }
    assert (spec.overlap, spec.posts_late, spec.replicated, spec.loss_computes_logits) == (
        None,
        False,
        True,
        False,
    )
