"""Newer stream commands: which of them this server has, asked without looking at its version.

Nothing in rsmq needs one (docs/decisions/0012-newer-commands.md); `rsmq doctor` tells.
"""

from __future__ import annotations

from typing import Final

from rsmq.connect import Client
from rsmq.errors import BrokerError, ConfigError

SINCE: Final = {"xackdel": "8.2", "xdelex": "8.2", "xcfgset": "8.6", "xnack": "8.8"}
"""The first version of Redis with it. XCFGSET stands for IDMP, which is an option of XADD and cannot be asked for."""


async def newer_commands(client: Client) -> tuple[str, ...]:
    """Their names, sorted; empty where there are none, or where this user may not ask.

    `COMMAND LIST`, not `COMMAND INFO`: of a command that the server does not know redis-py cannot read the answer.
    """
    try:
        names = await client.execute_command("COMMAND LIST", "FILTERBY", "PATTERN", "x*")
    except (BrokerError, ConfigError):
        return ()
    return tuple(sorted(name.decode().upper() for name in names if name.decode().lower() in SINCE))
