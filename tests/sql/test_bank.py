"""The bank in short: workers die between commit and settlement, and the relay between publish and delete."""

from __future__ import annotations

from pathlib import Path

from tests.sql.bank import run_bank


async def test_each_transfer_and_each_receipt_counts_once(tmp_path: Path) -> None:
    """One worker is killed at each point, one sleeps for longer than its lease: nothing is missing or doubled."""
    verdict = await run_bank(60, die=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"commit", "relay", "sleep"}
    assert verdict.is_good, verdict


async def test_without_effects_a_transfer_counts_twice(tmp_path: Path) -> None:
    """The control: the same work with a transaction of its own and a publish after it."""
    verdict = await run_bank(60, die=tmp_path, mode="--plain")
    assert verdict.kills == 1, verdict
    assert verdict.doubled > 0, verdict
