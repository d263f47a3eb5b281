"""The contract of the data path, asked once more of a cluster: the same tests, with this directory's brokers."""

from __future__ import annotations

from tests.contract.test_delivery import *  # noqa: F403
from tests.contract.test_order import *  # noqa: F403
from tests.contract.test_ownership import *  # noqa: F403
