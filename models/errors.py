"""Errors of the checkpoint side."""


class CheckpointError(Exception):
    """The checkpoint cannot be used; the message is one line: what, where, and how to mend it."""
