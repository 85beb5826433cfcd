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
from importlib import import_module
from typing import Any, NoReturn, TextIO

import elche_jax
from elche_jax.cli.errors import CommandError, UsageError

PROGRAM = "elche-jax"
COMMANDS = ("devices", "demo", "advise", "launch", "report", "trace")
"""Each is a module of this package, imported on demand: most import JAX, `launch` does not."""


OK, FAILED, USAGE = 0, 1, 2
INTERRUPTED, BROKEN_PIPE = 130, 141
"""128 plus the signal number, as shells report it."""


class Parser(argparse.ArgumentParser):
    """An argument parser that reports errors in one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with one line on stderr."""
        self.exit(USAGE, f"{self.prog}: {message} ({self.prog} --help shows how)\n")


def make_parser(asked: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return a parser for the requested command, or for all commands if none of them is requested.

    Args:
        asked: The arguments.
    """
    parser = Parser(
        prog=PROGRAM,
        description="Data-parallel training at the sum of the devices' speeds.",
        epilog="Exit codes: 0 success, 1 the command failed, 2 wrong usage.",
    )
    version = f"{PROGRAM} {elche_jax.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in asked[:1] if asked and asked[0] in COMMANDS else COMMANDS:
        command: Any = import_module(f"elche_jax.cli.{name}")
        own = commands.add_parser(
            name,
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
    """Run a command.

    Args:
        argv: The arguments. None takes those of the process; Ctrl-C then ends the process
            instead of returning.

    Returns:
        The exit code: 0 for success, 1 if the command failed, 2 for wrong usage, 130 if
        stopped by Ctrl-C, 141 if the reader of the output is gone.

    Examples:
        >>> from elche_jax.cli import main
        >>> main(["devices", "--seconds", "soon"])  # explains itself on stderr
        2
    """
    _open_streams()
    with _escaping_unencodable(sys.stdout):
        return _main(argv)


def _main(argv: Sequence[str] | None) -> int:
    options = argparse.Namespace(debug=False, prog=PROGRAM)
    try:
        asked = sys.argv[1:] if argv is None else argv
        make_parser(asked).parse_args(asked, options)
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
            # Skip interpreter shutdown: the runtime aborts if one of its threads happens to be
            # in the callback of an emulated device at that moment.
            os._exit(INTERRUPTED)
        return INTERRUPTED
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _stdout_has_no_reader():
            # Buffered output would otherwise fail again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return BROKEN_PIPE
        if options.debug:
            traceback.print_exc()
        print(f"{options.prog}: {_one_line(error)}", file=sys.stderr)
        return USAGE if isinstance(error, UsageError) else FAILED


def _open_streams() -> None:
    """Replace missing standard streams (a process started with `>&-`) with null streams.

    In this order each gets its own descriptor, which a file or a pipe that is opened later would
    get otherwise.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            # Never closed, so that interpreter shutdown can still flush the stream.
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, os.fdopen(null, mode, encoding="utf-8", closefd=False))


@contextmanager
def _escaping_unencodable(stream: TextIO) -> Generator[None]:
    r"""Write characters that the stream cannot encode as `\u00e9`, as stderr does.

    Commands print the names of files and devices and must not fail on any of them.
    """
    if not isinstance(stream, io.TextIOWrapper):
        yield
        return
    errors = stream.errors
    # `surrogateescape`, which Python chooses in the C locale, cannot fail with UTF-8.
    utf8 = codecs.lookup(stream.encoding).name == "utf-8"
    if errors == "strict" or (errors == "surrogateescape" and not utf8):
        stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        # `reconfigure` flushes; a failure has been reported already, or the stream is closed.
        with suppress(OSError, ValueError):
            stream.reconfigure(errors=errors)


def _stdout_has_no_reader() -> bool:
    """Return whether the other end of stdout is closed.

    A broken pipe may also come from a pipe of the TARGET. stdout is polled instead of written
    to, because after a failed write an unbuffered stream has nothing left to write.
    """
    try:
        watch = select.poll()
        watch.register(sys.stdout.fileno(), 0)  # errors and hang-ups are always reported
        return bool(watch.poll(0))
    except (AttributeError, OSError, ValueError):  # no `poll` on Windows, or not a real stream
        return False


def _one_line(error: Exception) -> str:
    """Return an error as one readable line."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    text = " ".join(str(error).split("\n\n")[0].split())
    if isinstance(error, CommandError):
        return text
    # Our own ValueErrors name the argument; for other exceptions the type is informative.
    if not (text and isinstance(error, ValueError)):
        text = f"{type(error).__name__}: {text}".removesuffix(": ")
    return f"{text} (--debug shows where)"
