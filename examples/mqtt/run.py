"""Sensors publish by MQTT, a handler answers, a phone reads; the phone's gateway is killed. Ends with a verdict.

pip install 'rsmq[embedded,mqtt]' paho-mqtt
python examples/mqtt/run.py
python examples/mqtt/run.py --sensors 50 --readings 200
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import random
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, Final, Literal

import typer
from paho.mqtt.client import Client, MQTTMessage
from paho.mqtt.enums import CallbackAPIVersion
from service import SIZE

from rsmq import SyncBroker

PATIENCE: Final = 60.0
"""Give up after so many seconds."""
PAUSE: Final = 0.01
Means = dict[tuple[str, int], float]


def main(
    sensors: Annotated[int, typer.Option(min=1, max=500, help="How many.")] = 10,
    readings: Annotated[int, typer.Option(min=SIZE, max=10_000, help="How many each of them publishes.")] = 100,
    url: Annotated[str | None, typer.Option(help="The server. Default: RSMQ_URL, else an embedded one.")] = None,
) -> None:
    """Publish readings, kill a gateway, and compare what the phone gets (exit code 1 if it is wrong)."""
    logging.getLogger("rsmq").setLevel(logging.ERROR)
    folder = Path(tempfile.mkdtemp(prefix="rsmq-mqtt-"))
    values = {
        f"sensor-{n}": [round(random.uniform(15, 25), 1) for _ in range(readings - readings % SIZE)]
        for n in range(sensors)
    }
    overrides: dict[str, Any] = {} if url is None else {"url": url}
    with SyncBroker(prefix=f"mqtt-{secrets.token_hex(4)}", **overrides) as broker:
        environment = {**os.environ, "RSMQ_URL": broker.url, "RSMQ_PREFIX": broker.settings.prefix}
        got = perform(values, folder, environment)
        broker.topics.delete("readings")
    if not judge(expected(values), got):
        print(f"A promise was BROKEN: the logs are in {folder}")
        sys.exit(1)
    print("Every mean has reached the phone.")
    shutil.rmtree(folder)


def perform(values: dict[str, list[float]], folder: Path, environment: dict[str, str]) -> Means:
    """Run two gateways, a worker, the sensors and the phone. Returns what the phone has got."""
    got: Means = {}
    acknowledged = list[int]()

    def on_message(_client: Client, _data: Any, message: MQTTMessage) -> None:
        answer = json.loads(message.payload)
        got[answer["sensor"], answer["number"]] = answer["mean"]

    def on_publish(_client: Client, _data: Any, packet_id: int, *_: object) -> None:
        acknowledged.append(packet_id)

    rows = list(zip(*values.values(), strict=True))
    total = len(rows) * len(values)
    with ExitStack() as stack:
        mqtt, web = free_ports(2), free_ports(2)
        start(stack, folder / "worker.log", environment, "worker", "service:broker")
        gateways = dict[int, subprocess.Popen[bytes]]()
        for n in range(2):
            listen = "--listen", f"mqtt://127.0.0.1:{mqtt[n]}", "--listen", f"ws://127.0.0.1:{web[n]}"
            log = folder / f"gateway-{n}.log"
            gateways[web[n]] = start(stack, log, environment, "gateway", "service:gateway", *listen)
        phone = connect(stack, "phone", web, "websockets")
        phone.on_message = on_message
        sensors = [connect(stack, name, mqtt if n % 2 else mqtt[::-1]) for n, name in enumerate(values)]
        wait(lambda: all(each.is_connected() for each in (phone, *sensors)))
        for number, row in enumerate(rows):
            for sensor, value in zip(sensors, row, strict=True):
                sensor.on_publish = on_publish
                sensor.publish("sensors/temperature", json.dumps({"number": number, "value": value}), qos=1)
            if number == len(rows) // 2:
                wait(lambda: len(got) > 0)
                gateways[phone.port].kill()
            time.sleep(PAUSE)
        wait(lambda: len(acknowledged) == total and len(got) == total // SIZE)
    print(f"readings    {total}: {len(acknowledged)} acknowledged, one gateway killed")
    return got


def connect(
    stack: ExitStack, name: str, ports: Sequence[int], transport: Literal["tcp", "websockets"] = "tcp"
) -> Client:
    """A client with a session that outlives its connections: it goes on at the next gateway."""
    client = Client(CallbackAPIVersion.VERSION2, name, clean_session=False, transport=transport)
    turn = itertools.cycle(ports)

    def go_on(*_: object) -> None:
        client.connect_async("127.0.0.1", next(turn))

    go_on()
    client.on_disconnect = client.on_connect_fail = go_on  # a load balancer would do this
    client.reconnect_delay_set(1, 1)
    client.loop_start()
    stack.callback(disconnect, client)
    return client


def disconnect(client: Client) -> None:
    """Say goodbye, and do not connect again."""
    client.on_disconnect = client.on_connect_fail = None
    client.disconnect()
    client.loop_stop()


def start(stack: ExitStack, log: Path, environment: dict[str, str], *command: str) -> subprocess.Popen[bytes]:
    """A process of rsmq, which ends with the stack."""
    with log.open("wb") as file:
        running = subprocess.Popen(
            [sys.executable, "-m", "rsmq", *command], cwd=Path(__file__).parent, env=environment, stdout=file,
            stderr=file,
        )  # fmt: skip
    stack.callback(running.wait)
    stack.callback(running.terminate)
    return running


def free_ports(count: int) -> list[int]:
    """Ports on which nothing listens now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def wait(condition: Callable[[], bool]) -> None:
    """Until it is true, or patience has ended: then the verdict says what is missing."""
    end = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)


def expected(values: dict[str, list[float]]) -> Means:
    """What the phone must get."""
    return {
        (sensor, at // SIZE): mean(found[at : at + SIZE])
        for sensor, found in values.items()
        for at in range(0, len(found), SIZE)
    }


def judge(wanted: Means, got: Means) -> bool:
    """Print whether the phone got each mean, and return it."""
    missing, unknown = len(wanted.keys() - got.keys()), len(got.keys() - wanted.keys())
    wrong = sum(abs(got[each] - wanted[each]) > 1e-9 for each in wanted.keys() & got.keys())
    is_good = not (missing or unknown or wrong)
    print(f"means       {len(got)}: {missing} missing, {unknown} unknown, {wrong} wrong {'✓' if is_good else '✗'}")
    return is_good


if __name__ == "__main__":
    typer.run(main)
