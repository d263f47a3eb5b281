"""A script with a `SyncBroker` that ends in one of several ways. Run by test_sync_broker.py, as a fork."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time

import anyio._backends._asyncio  # noqa: F401 - loaded before the fork

import rsmq.cli.worker  # noqa: F401 - the same
from rsmq import BrokerError, Settings, SyncBroker


def interrupt(started: threading.Event | None = None) -> None:
    """As Ctrl-C does, when it has started."""
    if started is not None:
        started.wait()
    os.kill(os.getpid(), signal.SIGINT)


def main(mode: str, url: str, prefix: str) -> None:
    """Publish, connect or work, and end."""
    broker = SyncBroker(Settings(url=url, prefix=prefix, preflight="warn", unavailable_timeout="PT60S"))
    if mode == "exit":
        broker.publish("orders", {})
    elif mode == "exit in a thread":
        with broker:
            waiting = broker.connect("phone").__enter__()

            def listen() -> None:
                with contextlib.suppress(BrokerError):
                    next(waiting)

            threading.Thread(target=listen, daemon=True).start()
            threading.Thread(target=broker.publish, args=("orders", {}), daemon=True).start()
            broker.publish("orders", {})
            sys.stdout.flush()
            raise SystemExit(0)
    elif mode == "fork":
        with broker:
            broker.publish("orders", {})
            child = os.fork()
            broker.publish("orders", {})
        if child == 0:
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        broker.publish("orders", {})
    elif mode == "interrupt a session":
        with broker.connect("phone") as session:
            threading.Timer(0.3, interrupt).start()
            next(session)
    elif mode == "interrupt connecting":
        threading.Timer(0.3, interrupt).start()
        broker.publish("orders", {})
    elif mode == "interrupt the worker":
        started, done = threading.Event(), list[object]()

        @broker.handler("orders", group="billing")
        def bill(order: dict[str, object]) -> None:
            started.set()
            time.sleep(0.3)
            done.append(order)

        broker.publish("orders", {})
        threading.Thread(target=interrupt, args=(started,), daemon=True).start()
        try:
            broker.run()
        except KeyboardInterrupt:
            print("handled", len(done), broker.worker)
            raise


if __name__ == "__main__":
    main(*sys.argv[1:])
