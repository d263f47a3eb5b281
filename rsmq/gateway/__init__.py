"""The MQTT gateway: connections of MQTT clients, whose messages land in topics and whose inboxes wait on the server.

Without I/O: `packet` (the control packets), `properties`, `decode` and `encode` (bytes and packets), `topic_filter` and
`filter_tree` (what matches what), `machine` (the rules of one connection), `inbound` (what a client has published).

On the server: `registry` (subscriptions), `router` (from topics to inboxes), `retained`, `sessions` (ends of
connections), `ingest` (into topics), `broadcast` (QoS 0), `scripts`. One connection: `client`, with `publishing`,
`subscribing`, `delivery` and `inbox_reader`; `message` is what they pass on. One process: `gateway`, with `context`,
`routes`, `auth`, `options`, `listener` and `web_socket`.
"""

from rsmq.gateway.gateway import Gateway
from rsmq.gateway.options import GatewayOptions

__all__ = ["Gateway", "GatewayOptions"]
