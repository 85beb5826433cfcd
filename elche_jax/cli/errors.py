"""Errors that end a command."""


class CommandError(Exception):
    """The command failed; the message says why, and the exit code is 1."""


class UsageError(CommandError):
    """The arguments are wrong; the exit code is 2."""
