"""`elche-jax trace`: write a run for a trace viewer."""

import argparse

from elche_jax.cli import arguments
from elche_jax.cli.report import load, output_of
from elche_jax.observe.trace import write_trace

HELP = "make a trace of a run for ui.perfetto.dev and similar viewers"
EPILOG = """\
RUN is the folder of a run (Trainer.fit(run_dir=...)) or a timeline (elche.Timeline(path)).

example:
  elche-jax trace runs/mnist
  elche-jax trace runs/mnist/timeline.jsonl --output mnist.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    compressed = "compressed if it ends in .gz (trace.json.gz beside the timeline)"
    arguments.add_run(parser, f"the trace to write, {compressed}")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    output = output_of(options, "trace.json.gz")
    print(f"trace: {write_trace(load(options.path), output)}")
    print("Open it at https://ui.perfetto.dev, or at chrome://tracing.")
    return 0
