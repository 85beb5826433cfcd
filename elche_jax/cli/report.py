"""`elche-jax report`: write a run as one page."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from elche_jax.cli import arguments
from elche_jax.cli.errors import CommandError, UsageError
from elche_jax.observe.page import write_page
from elche_jax.observe.run import Run, read_run
from elche_jax.observe.timeline import TIMELINE

HELP = "make an HTML page of a run: times, counts, busy shares, losses"
EPILOG = """\
RUN is the folder of a run (Trainer.fit(run_dir=...)) or a timeline (elche.Timeline(path)).

example:
  elche-jax report runs/mnist --open
  elche-jax report runs/mnist/timeline.jsonl --output mnist.html --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    arguments.add_run(parser, "the page to write (report.html beside the timeline)")
    parser.add_argument(
        "--title", type=arguments.words, help="the page's title (the name of the run)"
    )
    parser.add_argument("--open", action="store_true", help="show it in the browser")
    arguments.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    output = output_of(options, "report.html")
    found = load(options.path)
    path = write_page(found, output, title=options.title)
    report = found.report()
    if options.json:
        print(json.dumps({"run": found.name, "page": str(path)} | asdict(report), indent=2))
    else:
        print(report, f"page: {path}", sep="\n")
    if options.open:
        import webbrowser

        if not webbrowser.open(path.resolve().as_uri()):
            print("elche-jax report: no browser could be started", file=sys.stderr)
            return 1
    return 0


def load(path: Path) -> Run:
    """Read a run, which must have at least one window."""
    if path.is_dir() and not (path / TIMELINE).is_file():
        raise CommandError(f"{path} must be the folder of a run, but has no {TIMELINE}")
    found = read_run(path)
    if not found.windows:
        raise CommandError(f"{path} must hold at least one window, but has none")
    return found


def output_of(options: argparse.Namespace, name: str) -> Path:
    """Return where to write a file about a run: beside its timeline unless `--output` is given."""
    timeline: Path = options.path / TIMELINE if options.path.is_dir() else options.path
    output: Path = options.output or timeline.with_name(name)
    if output.is_dir():
        raise UsageError(f"--output must be a file, got a folder ({output})")
    if output.exists() and timeline.exists() and output.samefile(timeline):
        raise UsageError(f"--output must not be the timeline itself, got {output}")
    return output
