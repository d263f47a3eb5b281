"""The shop: a short run with a killed worker, and its verdict, which detects each violation."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tests.examples.program import EXAMPLES, run_python

SCRIPT = EXAMPLES / "shop" / "run.py"


def test_each_order_has_one_invoice_and_one_receipt(env: dict[str, str], tmp_path: Path) -> None:
    """A worker is killed: nothing is missing, nothing is there twice."""
    output = run_python(SCRIPT, "--orders", "30", "--kills", "1", cwd=tmp_path, env=env)
    assert output.splitlines() == [
        "orders      30, workers killed 1 times",
        "invoices    30: 0 missing, 0 doubled, 0 unknown ✓",
        "receipts    30: 0 missing, 0 doubled, 0 unknown ✓",
        "One invoice and one receipt for each order.",
    ]


@pytest.fixture(scope="module")
def shop() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("examples_shop_run", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([2, 1], "0 missing, 0 doubled, 0 unknown ✓"), ([1], "1 missing, 0 doubled, 0 unknown ✗"),
        ([1, 2, 2], "0 missing, 1 doubled, 0 unknown ✗"), ([1, 2, 3], "0 missing, 0 doubled, 1 unknown ✗"),
    ],
)  # fmt: skip
def test_the_verdict_detects_each_violation(
    shop: ModuleType, capsys: pytest.CaptureFixture[str], found: list[int], said: str
) -> None:
    """Each has its own count, and makes the verdict bad."""
    assert shop.judge("invoices", [1, 2], found) == ("✓" in said)
    assert said in capsys.readouterr().out
