"""A woven run equals the single device: the heart of the project.

    case.py ── a model, its data, its loss; what is done with them ──┐
    cases.py (layers.py, models.py, data.py) ── all of them ─────────┤
    reference.py ── plain PyTorch, one process ──┐                   │
    woven.py ────── plait, in each rank ─────────┴─ outcome.py ── parity.py: are they equal? (norm.py)

`pairs.py` picks the layouts of the default run; `defects.py` breaks plait on purpose: the tests must go red.
"""
