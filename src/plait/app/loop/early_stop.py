"""`EarlyStop`: ends a run without improvement; and the choice of the validation that a callback watches."""

from __future__ import annotations

from itertools import takewhile

from plait.app.loop.training_loop import Callback, TrainingLoop
from plait.app.loop.validation import Validation
from plait.errors import DataError
from plait.plan.arguments import require_instance, require_whole


class EarlyStop(Callback):
    """Ends the run after `patience` validations in a row without a lower validation loss."""

    def __init__(self, patience: int, *, watch: str | None = None) -> None:
        """Place it after the `Validation` whose losses it compares: the one named `watch`, or the first one.

        Raises `ConfigError`.
        """
        require_whole("EarlyStop's patience", patience)
        if watch is not None:
            require_instance("EarlyStop's watch", watch, str, "give the name of a Validation")
        self._patience, self._watch = patience, watch
        self._validation = Validation(None)

    def begin(self, run: TrainingLoop) -> None:
        """Find the validation; end a run that had ended before it was resumed. Raises `DataError`."""
        self._validation = watched_validation(self, run, self._watch)
        self._stop_if_worse(run, run.done)

    def measured(self, run: TrainingLoop, row: dict[str, float]) -> None:
        """Stop the run on all ranks where enough validations had no lower loss."""
        if self._validation.loss_name in row:
            self._stop_if_worse(run, int(row["step"]))

    def _stop_if_worse(self, run: TrainingLoop, step: int) -> None:
        lowest, worse = self._validation.lowest, self._validation.worse
        if lowest is not None and worse >= self._patience and not run.stopped:
            run.tell(
                f"The run ends after step {step}: {worse} validation{'s' * (worse > 1)} had no lower loss "
                f"than {lowest.loss:.3f}, that of step {lowest.step}."
            )
            run.stop()


def watched_validation(callback: Callback, run: TrainingLoop, watch: str | None) -> Validation:
    """Return the validation named `watch` among the callbacks before `callback`; for None the first.

    Only those that validate during the run count. Raises `DataError` where there is none.
    """
    before = takewhile(lambda other: other is not callback, run.callbacks)
    regular = [other for other in before if isinstance(other, Validation) and other.is_regular]
    found = [one for one in regular if watch in (None, one.name)]
    kind = type(callback).__name__
    if not found and regular:
        names = ", ".join(repr(one.name) for one in regular)
        raise DataError(
            f"{kind} watches the validation {watch!r}, but those before it are {names}: name one."
        )
    if not found:
        raise DataError(
            f"{kind} needs validation losses, but nothing before it in the list of callbacks validates "
            "during the run: give fit validation and validate_every, or place a Validation before it."
        )
    if len(found) > 1:
        run.tell(f"{kind} compares {found[0].loss_name}; watch={found[1].name!r} compares another.")
    return found[0]
