"""The garbage collector of a worker."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from rsmq import tune_garbage_collector
from rsmq.worker.collector import INTERPRETERS, YOUNG


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


def test_worker_collects_garbage_less_often() -> None:
    """Loaded modules are exempt, and a run waits for more new objects."""
    gc.set_threshold(INTERPRETERS[0], 10, 10)
    tune_garbage_collector()
    assert gc.get_threshold()[0] == YOUNG
    assert gc.get_freeze_count() > 0


def test_threshold_of_the_application_is_kept() -> None:
    """A threshold other than the interpreter's was set on purpose."""
    gc.set_threshold(123, 4, 5)
    tune_garbage_collector()
    assert gc.get_threshold()[0] == 123
