"""`python -m tests.figures` beside a commit whose packages are not installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.figures.__main__ import follow


def test_a_commit_that_needs_another_package_is_answered_with_its_name(tmp_path: Path) -> None:
    """Instead of a traceback: which package to install."""
    (tmp_path / "rsmq").mkdir()
    (tmp_path / "rsmq" / "__init__.py").write_text("import a_package_of_old_times.settings\n")
    with pytest.raises(SystemExit, match="pip install a-package-of-old-times"):
        follow(tmp_path, "publish")
