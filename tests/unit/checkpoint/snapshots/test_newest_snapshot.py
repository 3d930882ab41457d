"""A snapshot is complete where all ranks that wrote it have completed it, in one attempt."""

from plait.checkpoint.snapshots.snapshot_parts import SnapshotName, newest_first


def test_a_snapshot_is_complete_with_the_parts_of_all_ranks_of_one_attempt() -> None:
    first, second = SnapshotName(4, "first", 2), SnapshotName(4, "second", 2)
    assert newest_first([(0, first), (1, second)]) == [(first, False), (second, False)]
    assert newest_first([(0, first), (1, second), (1, first)]) == [(first, True), (second, False)]
    assert not any(whole for _, whole in newest_first([(0, first), (1, SnapshotName(4, "first", 3))]))


def test_the_newest_snapshot_is_the_first() -> None:
    names = [SnapshotName(step, "attempt", 1) for step in (3, 12, 4)]
    assert [name.step for name, _ in newest_first([(0, name) for name in names])] == [12, 4, 3]
