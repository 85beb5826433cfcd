"""The command line: `elche-jax`, or `python -m elche_jax`."""

import argparse
import codecs
import io
import os
import select
import sys
import traceback
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn, TextIO

import elche_jax
from elche_jax.cli import advise, demo, devices, report, trace
from elche_jax.cli.errors import CommandError, UsageError

PROGRAM = "elche-jax"
COMMANDS = (devices, demo, advise, report, trace)

_MAY_FAIL = ("strict", "surrogateescape")
"""Error handlers that may fail; the second one, of the C locale, only if it is not UTF-8."""

OK, FAILED, USAGE = 0, 1, 2
INTERRUPTED, BROKEN_PIPE = 130, 141
"""128 plus the number of the signal, as in a shell."""


class Parser(argparse.ArgumentParser):
    """A parser that reports errors in one line."""

    def error(self, message: str) -> NoReturn:
        """Ends the program with one line on stderr."""
        self.exit(USAGE, f"{self.prog}: {message} ({self.prog} --help shows how)\n")


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = Parser(
        prog=PROGRAM,
        description="Data-parallel training at the sum of the devices' speeds.",
        epilog="Exit codes: 0 done, 1 the command could not do it, 2 wrong usage.",
    )
    version = f"{PROGRAM} {elche_jax.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        own = commands.add_parser(
            command.NAME,
            help=command.HELP,
            description=f"{command.HELP[0].upper()}{command.HELP[1:]}.",
            epilog=command.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(own)
        own.add_argument("--debug", action="store_true", help="show the traceback of an error")
        own.set_defaults(run=command.run, debug=False, prog=own.prog)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: The arguments; None for those of the process, which Ctrl-C then ends.

    Returns:
        The exit code: 0 done, 1 the command could not do it, 2 wrong usage, 130 stopped by
        Ctrl-C, 141 the output has no reader any more.

    Examples:
        >>> from elche_jax.cli import main
        >>> main(["devices", "--seconds", "soon"])  # says why on stderr
        2
    """
    _open_streams()
    with _any_text(sys.stdout):
        return _main(argv)


def _main(argv: Sequence[str] | None) -> int:
    options = argparse.Namespace(debug=False, prog=PROGRAM)
    try:
        make_parser().parse_args(argv, options)
        code = options.run(options)
        sys.stdout.flush()
        return code
    except SystemExit as ended:  # from argparse, or from a TARGET
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or OK
        print(ended.code, file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"{options.prog}: stopped", file=sys.stderr, flush=True)
        if argv is None:
            # Not by way of the interpreter's end: the runtime would abort if one of its threads
            # were in the callback of an emulated device at that moment.
            os._exit(INTERRUPTED)
        return INTERRUPTED
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            # What is still buffered would otherwise fail again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return BROKEN_PIPE
        if options.debug:
            traceback.print_exc()
        print(f"{options.prog}: {_one_line(error)}", file=sys.stderr)
        return USAGE if isinstance(error, UsageError) else FAILED


def _open_streams() -> None:
    """Gives a process that was started without stdout or stderr (`>&-`) a null stream."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            setattr(sys, name, os.fdopen(nowhere, "w", encoding="utf-8", closefd=False))


@contextmanager
def _any_text(stream: TextIO) -> Generator[None]:
    r"""Writes characters that the stream's encoding lacks as `\u00e9`, as stderr does.

    Commands print names of files and devices, and must not fail at one.
    """
    if not isinstance(stream, io.TextIOWrapper) or stream.errors not in _MAY_FAIL:
        yield
        return
    errors = stream.errors
    if errors == "strict" or codecs.lookup(stream.encoding).name != "utf-8":
        stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        with suppress(OSError, ValueError):  # it flushes: reported already, or closed
            stream.reconfigure(errors=errors)


def _nobody_reads() -> bool:
    """Whether the other end of stdout is closed: the broken pipe may be a TARGET's own.

    stdout is polled, not written to: after a failed write an unbuffered stream has nothing left.
    """
    try:
        watch = select.poll()
        watch.register(sys.stdout.fileno(), 0)  # errors and hang-ups are always reported
        return bool(watch.poll(0))
    except (AttributeError, OSError, ValueError):  # no poll here, or no real stream
        return False


def _one_line(error: Exception) -> str:
    """The error in one readable line."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    text = " ".join(str(error).split("\n\n")[0].split())
    if isinstance(error, CommandError):
        return text
    if not (text and isinstance(error, ValueError)):  # a ValueError needs no name
        text = f"{type(error).__name__}: {text}".removesuffix(": ")
    return f"{text} (--debug shows where)"
