"""Chooses the plan of an elastic run for the ranks that are left: fewer replicas, else other degrees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice, product
from math import gcd, inf

from plait.app.config.config import Config, vocabulary
from plait.app.train.predicted_run import predicted_step
from plait.app.train.trainer import build_model
from plait.engine.blueprint import build_blueprint
from plait.errors import PlaitError
from plait.plan.axes import PLAN_AXES
from plait.ranks.accelerator import CPU
from plait.ranks.launch.elastic.options import Elastic
from plait.ranks.transport.process_ranks import current_ranks

_MOST_PREDICTED = 8
"""Plans whose steps are predicted, so that a recovery does not wait for predictions."""


def config_of_world(config: Config) -> Config:
    """Return the configuration, with a smaller plan where the world has fewer ranks than its plan."""
    world = current_ranks()
    if not config.run.elastic or world is None or world.size >= config.plan().world:
        return config
    found = config_for_ranks(config, world.size, least=world.size)
    assert found is not None, "the supervisor has found it"
    return found


def elastic_settings(config: Config) -> Elastic | None:
    """Return the `Elastic` that `run.elastic` and the fields with it describe, or None."""
    run = config.run
    if not run.elastic:
        return None

    def ranks_of(ready: int) -> int:
        found = config_for_ranks(config, ready)
        return 0 if found is None else found.plan().world

    return Elastic(spares=run.spares, replace=run.replace, ranks_of=ranks_of, hosts=run.hosts)


def config_for_ranks(config: Config, ranks: int, *, least: int = 1) -> Config | None:
    """Return the configuration with a plan for `least` to `ranks` ranks; None where no plan fits the model.

    The plan itself, where it takes no more; else one with fewer data-parallel ranks; else the one with the
    most ranks, of these one that divides the model over the most, and differs least. With `run.hardware` in
    place of that the one of the shortest predicted step among the first of that order, and only plans whose
    predicted memory fits, if there are. A step has the same batch, and a micro-batch at most as many rows on
    a rank. All ranks find the same one.
    """
    if config.plan().world <= ranks:
        return config
    fewer, others = (
        [one for one in degrees if _world(one) >= least]
        for degrees in (_fewer_replicas(config, ranks), _other_degrees(config, ranks))
    )
    if config.run.hardware is not None:
        for one in _possible(config, fewer):
            if _predicted_seconds(one) is not None:
                return one
        first = enumerate(islice(_possible(config, others), _MOST_PREDICTED))
        timed = [(s, number, one) for number, one in first if (s := _predicted_seconds(one)) is not None]
        if timed:
            return min(timed, key=lambda each: each[:2])[2]
    return next(_possible(config, [*fewer, *others]), None)


def _possible(config: Config, degrees: Iterable[dict[str, int]]) -> Iterator[Config]:
    """Yield the configuration with each of these degrees that divides its batch and its model."""
    for each in degrees:
        changed = _with_degrees(config, each)
        if changed is not None and _fits(changed):
            yield changed


def _predicted_seconds(config: Config) -> float | None:
    """Return the predicted time of a step on `run.hardware`; None where it needs more memory than that has.

    Where a prediction is refused, infinity, which comes last.
    """
    try:
        found = predicted_step(config, config.plan(), CPU)
    except PlaitError:
        return inf
    assert found is not None, "the hardware is given"
    return found.step_seconds if found.fits else None


def _fewer_replicas(config: Config, ranks: int) -> Iterator[dict[str, int]]:
    """Yield the plan's degrees with fewer `dp`, for at most `ranks` ranks, the most first."""
    own = _degrees(config)
    replica = config.plan().world // own["dp"]
    for dp in range(min(own["dp"] - 1, ranks // replica), 0, -1):
        yield own | {"dp": dp}


def _degrees(config: Config) -> dict[str, int]:
    return {axis: getattr(config.parallel, axis) for axis in PLAN_AXES}


def _other_degrees(config: Config, ranks: int) -> Iterator[dict[str, int]]:
    """Yield degrees of all plans for at most `ranks` ranks, preferred ones first."""
    own = _degrees(config)

    def order(degrees: dict[str, int]) -> tuple[int, ...]:
        model_ranks = degrees["pp"] * degrees["tp"]
        differing = [degrees[axis] != own[axis] for axis in PLAN_AXES]
        return -model_ranks * degrees["dp"] * degrees["cp"], -model_ranks, sum(differing), *degrees.values()

    counts = range(1, ranks + 1)
    every = (dict(zip(PLAN_AXES, each, strict=True)) for each in product(counts, repeat=len(PLAN_AXES)))
    yield from sorted((one for one in every if _world(one) <= ranks and one["cp"] <= own["cp"]), key=order)


def _world(degrees: dict[str, int]) -> int:
    return degrees["pp"] * degrees["dp"] * degrees["cp"] * degrees["tp"]


def _with_degrees(config: Config, degrees: dict[str, int]) -> Config | None:
    """Return the configuration with other degrees and the same batch, None if rows cannot be divided so."""
    old, train = config.parallel, config.train
    if train.batch % degrees["dp"]:
        return None
    most_rows, rows = train.batch // (old.dp * train.microbatches), train.batch // degrees["dp"]
    microbatches = next(
        count for count in range(1, rows + 1) if rows % count == 0 and rows // count <= most_rows
    )
    changed = degrees | {"replicate": gcd(old.replicate, degrees["dp"])}
    cut = {} if old.pp == degrees["pp"] else {"layers_per_stage": None}
    try:
        return Config(
            model=config.model,
            data=config.data,
            train=train.model_copy(update={"microbatches": microbatches}),
            parallel=old.model_copy(update=changed | cut),
            run=config.run,
        )
    except (PlaitError, ValueError):
        return None


def _fits(config: Config) -> bool:
    """Return whether the configured model can be divided by the configured plan."""
    try:
        build_blueprint(build_model(config.model, vocabulary(config)), config.plan())
    except PlaitError:
        return False
    return True
