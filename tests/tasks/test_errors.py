"""Errors that a person can act on, also from another process."""

from __future__ import annotations

import pickle
from pathlib import Path

from tasks.errors import Fault, Unavailable, in_words


def test_a_fault_is_the_same_after_its_way_through_a_pipe() -> None:
    fault = Fault("it is broken", got=Path("a"), expected=3, do="mend it")
    again = pickle.loads(pickle.dumps(fault))
    assert type(again) is Fault
    assert str(again) == str(fault) and again.line == fault.line == "it is broken: got a, expected 3; mend it"


def test_errors_in_words_name_their_kind_where_nobody_can_act_on_them() -> None:
    assert in_words(Unavailable("no GPU")) == "no GPU"
    assert in_words(ValueError("a\n b")) == "ValueError: a b"
