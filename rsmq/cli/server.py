"""`rsmq server`: the embedded server of this project, for as long as this command runs."""

from __future__ import annotations

import os
import signal

from rsmq.cli.option import Json
from rsmq.cli.printer import complain, dump, say
from rsmq.embedded import EmbeddedServer


def server(as_json: Json = False) -> None:
    """Run this project's embedded server until Ctrl-C. Whoever leaves RSMQ_URL unset here shares it."""
    embedded = EmbeddedServer()
    url = embedded.acquire()
    try:
        if os.environ.get("RSMQ_URL"):
            complain("RSMQ_URL is set: processes that see it do not use this server")
        if as_json:
            dump({"url": url, "directory": str(embedded.directory)}, is_line=True)
        else:
            say(f"{url}\ndata in {embedded.directory}; Ctrl-C ends it when nobody else uses it")
        # only now: the keeper, started above, must not inherit the mask
        wanted = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
        signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
        signal.sigwait(wanted)
    finally:
        embedded.release()
