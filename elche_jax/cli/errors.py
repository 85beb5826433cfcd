"""What a command ends with when it cannot go on."""


class CommandError(Exception):
    """The command cannot do it; the message says why, exit code 1."""


class UsageError(CommandError):
    """The arguments do not fit, exit code 2."""
