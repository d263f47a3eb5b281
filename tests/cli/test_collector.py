"""The garbage collector of a worker."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from rsmq.cli.collector import DEFAULT, YOUNG, relax


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


def test_it_looks_more_rarely() -> None:
    """What is loaded is out of its sight, and it waits for more new objects."""
    gc.set_threshold(*DEFAULT)
    relax()
    assert gc.get_threshold()[0] == YOUNG
    assert gc.get_freeze_count() > 0


def test_what_the_application_has_set_stays() -> None:
    """A threshold that is not the interpreter's own is somebody's decision."""
    gc.set_threshold(123, 4, 5)
    relax()
    assert gc.get_threshold()[0] == 123
