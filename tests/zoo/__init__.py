"""The zoo of mistakes: `plait verify` has to name each of them, and nothing where there is none.

    row.py        a mistake, the model and layout in which it is shown, and its true place
    patching.py   mistakes of one layer, one rank, one method
    models.py     users' models, losses and optimizers that are mistakes themselves

Each family keeps its mistakes and its rows together: `forward`, `losses`, `backward`, `weights`,
`reductions`, `updates`, `four` for four ranks, and what is cut between data-parallel ranks: `sharding` for
parameters, `scattering` for gradients; `stepping` for `Engine.step`, `bounds` for norms and clipping,
`precision` for dtypes, `scaling` for the loss scale; `dropping` for what dropout draws; `sequence` for
shards of the sequence between layers, `context` for parts of it on the ranks of cp; `passing` for what is
kept too long, `saving` for checkpoints. A mistake lasts while it is entered, in one rank's process. The
reference runs within it as well, so a mistake is made where only the woven run goes: in stages, parallel
modules, units, the gatherer, the reducer, the engine; or, in `definitions`, in code that the reference
replaces by its definition.

What a row expects is the place of the mistake, not what the verifier says of it. That is held by mistakes of
which the cause is known (`diagnosed.py`): `computing` and `training` for one rank, `exchanging` and
`reducing` for several, and `held_out`, which were written when the hypotheses stood.
"""
