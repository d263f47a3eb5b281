"""A Flask application that publishes orders and counts dead letters. Here it also runs the worker, sends itself three
requests, and stops.

    python examples/flask_shop.py

In production the two are processes of their own: `gunicorn --preload flask_shop:app` and `rsmq worker
flask_shop:broker`.
"""

import json
import threading
from urllib.request import Request, urlopen
from wsgiref.simple_server import WSGIRequestHandler, make_server

from flask import Flask, request

from rsmq import SyncBroker

broker = SyncBroker()  # connects at its first call, in each process of gunicorn
app = Flask("shop")
all_billed = threading.Event()


@app.post("/orders")
def order() -> dict[str, bool]:
    order = request.get_json()
    message_id = broker.publish("orders", order, key=order["customer"])
    return {"stored": bool(message_id)}


@app.get("/dead")
def dead() -> dict[str, int]:
    return {"dead letters": broker.dead_letters.count(broker.topics.existing("orders"), "billing")}


@broker.handler("orders", group="billing")
def bill(order: dict) -> None:  # a plain function runs in a thread, and may block
    print(f"billed {order['customer']} for order {order['number']}")
    if order["number"] == 3:
        all_billed.set()


class Silent(WSGIRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    server = make_server("127.0.0.1", 0, app, handler_class=Silent)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    for number in (1, 2, 3):
        body = json.dumps({"customer": "ada", "number": number}).encode()
        with urlopen(Request(f"{url}/orders", body, {"Content-Type": "application/json"})) as answer:
            print(json.load(answer))
    with broker.running():
        all_billed.wait()
    with urlopen(f"{url}/dead") as answer:
        print(json.load(answer))
    server.shutdown()


if __name__ == "__main__":
    main()
