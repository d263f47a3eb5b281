"""The end of a paho client: it leaves open a pair of sockets of its own, with which it wakes its thread."""

from __future__ import annotations

import paho.mqtt.client as paho


def leave(client: paho.Client) -> None:
    """Disconnect, end its thread and close all its sockets. It may connect again."""
    client.disconnect()
    client.loop_stop()
    client._reset_sockets()  # `loop_start` makes a new pair, and a collected client may find the old one closed or not
