"""`launch_by_config`: call a function in the ranks of a configuration's plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from plait.app.config.config import Config
from plait.ranks.launch.elastic.options import Elastic
from plait.ranks.launch.launch import launch

Result = TypeVar("Result")


def launch_by_config(
    config: Config, function: Callable[..., Result], *arguments: Any, elastic: Elastic | None = None
) -> list[Result]:
    """Call `function(config, *arguments)` in every rank of the configured plan; return all results.

    `elastic`: how ranks are restarted; None: they are not.
    """
    run = config.run
    return launch(
        function,
        config,
        *arguments,
        ranks=config.plan().world,
        threads=run.threads,
        timeout=run.timeout,
        device=run.device,
        ranks_as=run.ranks_as,
        ranks_per_gpu=run.ranks_per_gpu,
        elastic=elastic or False,
    )
