"""The contract of the data path, asked once more of a cluster: the same tests, with this directory's brokers."""

from __future__ import annotations

from tests.contract.test_bands import (  # noqa: F401
    test_a_reserved_slot_starts_an_urgent_message_while_all_others_are_busy,
    test_bands_are_added_while_a_worker_runs_and_a_group_is_paused,
    test_order_per_key_holds_within_a_band_through_failures_reset_and_replay,
)
from tests.contract.test_delivery import *  # noqa: F403
from tests.contract.test_order import *  # noqa: F403
from tests.contract.test_ownership import *  # noqa: F403
