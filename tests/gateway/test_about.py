"""When a certificate ends."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
import trustme

from rsmq.errors import ConfigError
from rsmq.gateway.about import expires


@pytest.mark.parametrize("year", [2038, 2057])  # the form of a time changes with 2050
def test_the_end_of_a_certificate_is_read(tmp_path: Path, year: int) -> None:
    """The first of a file with key and chain counts."""
    path, until = tmp_path / "server.pem", datetime(year, 3, 4, 5, 6, 7, tzinfo=UTC)
    trustme.CA().issue_cert("localhost", not_after=until).private_key_and_cert_chain_pem.write_to_path(path)
    assert expires(path) == until


@pytest.mark.parametrize("text", ["", "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n"])
def test_a_file_without_a_certificate_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "none.pem").write_text(text)
    with pytest.raises(ConfigError, match=r"none\.pem cannot be read"):
        expires(tmp_path / "none.pem")
