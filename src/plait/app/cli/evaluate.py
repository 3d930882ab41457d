"""`plait evaluate`: loss, perplexity and accuracy of a checkpoint on data, under any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from plait.app.cli.arguments import CommandParser, split_options
from plait.app.cli.ranks_and_signals import degrees, importing, local_ranks
from plait.app.data.tokenizer import printable
from plait.errors import ConfigError

_ABOUT = """\
Prints loss, perplexity and accuracy of the model in a checkpoint, on the data
of the run's validations, or on the DATA that are named: whatever data.source
takes. RUN is the folder of a run (run.dir), for its newest checkpoint, or a
checkpoint. Degrees of a plan are options: --parallel.dp 2."""
_EXAMPLES = (
    ("plait evaluate runs/demo", "the run's own validation data"),
    ("plait evaluate runs/demo notes.txt --json", "other data"),
    ("plait evaluate runs/demo/checkpoints/best", "the best one"),
)


def parser() -> CommandParser:
    """Return the parser of the options of `plait evaluate`, without those of the configuration."""
    made = CommandParser(
        "plait evaluate",
        usage="plait evaluate RUN [DATA ...] [--json] [--section.field VALUE ...]",
        description=_ABOUT,
        examples=_EXAMPLES,
        takes_configuration=True,
    )
    add = made.add_argument
    add("run", metavar="RUN", type=Path, help="folder of a run, or a checkpoint")
    add("data", metavar="DATA", nargs="*", default=[], help="file, folder, glob, prepared corpus or data set")
    add("--json", action="store_true", help="print one JSON object")
    return made


def run(argv: Sequence[str]) -> int:
    """Print loss, perplexity and accuracy of the checkpoint in `argv`; return 0. Raises PlaitError."""
    own, of_run = split_options(argv)
    options = parser().parse_intermixed_args(own)  # DATA may stand on both sides of an option
    if any(one.partition("=")[0] == "--config" for one in of_run):
        raise ConfigError(
            "--config is given, but the configuration is that of the checkpoint: leave it out, and give "
            "options such as --parallel.tp 2."
        )
    with importing():
        from plait.app.train.evaluation import checkpoint_of, evaluate, evaluation_config, prepare_data
        from plait.app.train.launch_by_config import launch_by_config

    checkpoint = checkpoint_of(options.run)
    config = evaluation_config(checkpoint, of_run, options.data)
    plan = config.plan()
    with local_ranks(plan.world, degrees(plan)) as prints:
        prepare_data(config)
        found = launch_by_config(config, evaluate, checkpoint)[0]
    if not prints:
        return 0
    if options.json:
        sets = [one.as_json() for one in found]
        print(json.dumps({"checkpoint": str(checkpoint), "data": sets}, indent=2, allow_nan=False))
        return 0
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("data", overflow="fold")
    for head in ("loss", "perplexity", "accuracy"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("sequences", overflow="fold")
    for one in found:
        numbers = f"{one.loss:.4f}", f"{one.perplexity:,.3f}", f"{one.accuracy:.2%}"
        table.add_row(printable(one.data), *numbers, one.which or f"{one.sequences:,}")
    print(f"{printable(str(checkpoint))}:")
    Console(markup=False, highlight=False).print(table)
    return 0
