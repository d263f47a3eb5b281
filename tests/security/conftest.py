"""What the tests about security share."""

from __future__ import annotations

import pytest

from tests.contract.witness import Witness


@pytest.fixture
def witness() -> Witness:
    """What the handlers of a test have seen."""
    return Witness()
