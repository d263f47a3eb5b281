"""What a start makes of the findings: it is refused, or warned and goes on."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Final

from rsmq.connect import Client
from rsmq.errors import ConfigError
from rsmq.keys import Keys
from rsmq.preflight.facts import gather
from rsmq.preflight.rule import Finding, judge
from rsmq.settings import Settings

log = logging.getLogger("rsmq.preflight")

TO_PUBLISH: Final = frozenset(
    "EVAL TIME XADD XLEN XRANGE GET SET EXISTS HGETALL HSETNX SADD ZADD".split()  # noqa: SIM905  a word each
)
"""What a publisher needs of all that is tried."""


async def require(client: Client, settings: Settings, keys: Keys, *, publishes_only: bool = False) -> list[Finding]:
    """Look at everything, and log what is not well.

    Raises ConfigError for what would lose messages, unless the setting `preflight` is "warn", and BrokerUnavailable.
    `publishes_only`: rights that only a worker needs are not missed.
    """
    facts = await gather(client, keys)
    if publishes_only:
        facts = [replace(each, failures=[one for one in each.failures if one[0] in TO_PUBLISH]) for each in facts]
    findings = judge(facts)
    refused = [finding for finding in findings if finding.level == "refuse"]
    if refused and settings.preflight == "refuse":
        raise ConfigError(
            "\n".join(str(finding) for finding in refused) + "\n(RSMQ_PREFLIGHT=warn starts nevertheless)"
        )
    for finding in findings:
        if finding.level != "ok":
            log.warning("%s", finding)
    return findings
