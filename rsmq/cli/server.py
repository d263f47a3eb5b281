"""`rsmq server`: the embedded server of this project, for as long as this command runs."""

from __future__ import annotations

import os
import signal

from rsmq.cli.output import print_error, print_json, print_line
from rsmq.cli.parameters import Json
from rsmq.redis.embedded.server import EmbeddedServer


def server(as_json: Json = False) -> None:
    """Run this project's embedded server until Ctrl-C. Processes of this project without RSMQ_URL share it."""
    embedded = EmbeddedServer()
    url = embedded.acquire()
    try:
        if os.environ.get("RSMQ_URL"):
            print_error("RSMQ_URL is set: processes with it do not use this server")
        if as_json:
            print_json({"url": url, "directory": str(embedded.directory)}, is_line=True)
        else:
            print_line(f"{url}\ndata in {embedded.directory}; Ctrl-C ends it unless other processes use it")
        # only now: the keeper, started above, must not inherit the mask
        wanted = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
        signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
        signal.sigwait(wanted)
    finally:
        embedded.release()
