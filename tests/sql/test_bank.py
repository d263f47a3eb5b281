"""The bank in short: workers die between commit and settlement, and the relay between publish and delete."""

from __future__ import annotations

from tests.sql.bank import run_bank


async def test_each_transfer_and_each_receipt_counts_once() -> None:
    """Several workers kill themselves on the way: no transfer and no receipt is missing or doubled."""
    verdict = await run_bank(150, die=0.01)
    assert verdict.is_good, verdict


async def test_without_effects_some_count_twice() -> None:
    """The control: the same work with a transaction of its own and a publish after it."""
    verdict = await run_bank(150, die=0.02, is_plain=True)
    assert verdict.kills > 0
    assert verdict.doubled + verdict.receipts_doubled > 0, verdict
