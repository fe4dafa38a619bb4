"""The error that a user can act on."""


class MemlabError(RuntimeError):
    """Something around memlab is missing or in the way; the message is one line that says what
    would work."""
