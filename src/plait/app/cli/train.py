"""`plait train`: read the configuration, check the data, then launch the ranks."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from plait.app.cli.arguments import CommandParser, configuration_overview
from plait.app.cli.ranks_and_signals import degrees, importing, local_ranks, stoppable
from plait.app.config.config_parser import config_from_arguments
from plait.errors import terminal_text

_ABOUT = """\
Trains a model over pipeline, tensor and data parallel ranks: starts them here,
or joins those that torchrun, mpirun or srun made. Options override the file."""
_EXAMPLES = (
    ("plait train --config examples/demo.toml", ""),
    ("plait train --parallel.pp 2 --parallel.tp 2 --train.steps 100", "four ranks"),
    ("plait train --model.name FOLDER --data.source chats.jsonl", "fine-tuning"),
)


def parser() -> CommandParser:
    """Return the parser of `plait train`, whose options are the fields of the configuration."""
    return CommandParser(
        "plait train",
        usage="plait train [--config FILE.toml] [--section.field VALUE ...]",
        description=f"{_ABOUT}\n\n{configuration_overview()}",
        examples=_EXAMPLES,
        takes_configuration=True,
    )


def run(argv: Sequence[str]) -> int:
    """Train with the configuration in `argv`, and return the exit code.

    0: done. 1: the first steps differ from those of one rank, or the last checkpoint could not be written.
    128 + signal: a signal stopped the run after a step. Raises `PlaitError` for user errors.
    """
    config = config_from_arguments(argv)

    with importing():  # late, so that help and errors do not wait for torch
        from plait.app.train.data_sources import with_context_of_data
        from plait.app.train.launch_by_config import launch_by_config
        from plait.app.train.plan_for_fewer_ranks import elastic_settings
        from plait.app.train.run_data import check_data
        from plait.app.train.train_run import train
        from plait.ranks.launch.rank_main_loop import STOP_SIGNAL
        from plait.ranks.launcher_environment import find_world

    plan = config.plan()
    local = find_world() is None or config.run.elastic
    in_processes = config.run.ranks_as == "processes"
    stop_signals: tuple[int, ...] = (STOP_SIGNAL,) if local else (signal.SIGINT, signal.SIGTERM)
    if not in_processes:
        stop_signals = ()  # only a main thread can handle them: the first one ends the run
    with (
        local_ranks(plan.world, degrees(plan), of_supervisors=config.run.elastic) as prints,
        stoppable(local=local and in_processes) as received,
    ):
        config, chosen = with_context_of_data(config, argv)
        if chosen and prints:
            print(terminal_text(chosen), flush=True)
        check_data(config)
        reports = launch_by_config(config, train, stop_signals, elastic=elastic_settings(config))
    if not reports[0].saved:
        return 1
    if stopped := reports[0].stopped:
        of_other_host = signal.SIGTERM if stopped == STOP_SIGNAL else stopped
        return 128 + (received[0] if received else of_other_host)
    return 0 if reports[0].matches else 1
