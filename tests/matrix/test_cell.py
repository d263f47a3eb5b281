"""How a cell counts its tests, and what its table says."""

from __future__ import annotations

from pathlib import Path

from tests.matrix.cell import Result, read
from tests.matrix.page import table

REPORT = """
<testsuites><testsuite>
  <testcase classname="tests.contract.test_order" name="test_a" time="1.5"/>
  <testcase classname="tests.contract.test_order" name="test_a" time="1.5"><failure/></testcase>
  <testcase classname="tests.contract.test_order" name="test_b" time="0.5"/>
  <testcase classname="tests.contract.test_order" name="test_b" time="0.5"/>
  <testcase classname="tests.contract.test_order" name="test_c" time="0"><skipped/></testcase>
</testsuite></testsuites>
"""


def test_test_that_was_run_again_counts_once_with_its_last_end(tmp_path: Path) -> None:
    """pytest's report has it once for each run, and no failure in the ones before the last."""
    report, result = tmp_path / "report.xml", Result("Valkey 9.1", "proxy: cuts")
    report.write_text(REPORT)
    read(result, report)
    assert (str(result), result.failed, result.seconds) == ("1/2", ["test_order::test_a"], 4.0)


def test_table_names_the_day_of_a_cell_that_is_older_than_others() -> None:
    """So that no old figure counts as a new one."""
    old = Result("Redis 7.0", "tcp", passed=83, measured="2026-11-21")
    new = Result("Valkey 9.1", "tcp", passed=522, measured="2026-11-28")
    lines = table([old, new], {"Redis 7.0": "Redis 7.0.15", "Valkey 9.1": "Valkey 9.1.2"}).splitlines()
    assert lines[0] == "Measured on 2026-11-28, where no other day is given."
    assert "| tcp | 83/83, on 2026-11-21 | 522/522 |" in lines
