"""Errors that a person can act on: what was got, what was expected, what to do."""

from __future__ import annotations

from functools import partial
from typing import Any


class Fault(Exception):
    """Bad input or a broken artifact.

    The command line prints the message without a traceback and exits with 2.
    """

    def __init__(self, what: str, *, got: object, expected: object, do: str) -> None:
        super().__init__(f"{what}\n  got:      {got}\n  expected: {expected}\n  to do:    {do}")
        self.what, self.got, self.expected, self.do = what, got, expected, do

    def __reduce__(self) -> tuple[Any, ...]:
        made = partial(Fault, self.what, got=str(self.got), expected=str(self.expected), do=self.do)
        return made, ()

    @property
    def line(self) -> str:
        """The same message in one sentence, for tables and reports."""
        return f"{self.what}: got {self.got}, expected {self.expected}; {self.do}"


class Unavailable(Exception):
    """A backend that can't run on this machine; the message is one line and says why."""


def in_words(error: Exception) -> str:
    """An error in one line, for tables and reports; of one that no person can act on, its kind comes first."""
    words = " ".join((error.line if isinstance(error, Fault) else str(error)).split())
    return words if isinstance(error, Fault | Unavailable) else f"{type(error).__name__}: {words[:300]}"
