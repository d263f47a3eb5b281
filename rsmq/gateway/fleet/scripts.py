"""The Lua scripts of the gateway, and the commands that it gathers like them."""

from __future__ import annotations

from typing import Final

from rsmq.redis.scripts import PlainCommand, Script

ACK_CLIENTS: Final = Script("gateway/ack_clients")
SUBSCRIBE_CLIENT: Final = Script("gateway/subscribe_client")
LOOK_AT_SUBSCRIPTIONS: Final = Script("gateway/look_at_subscriptions")
CLAIM_SUBSCRIPTIONS: Final = Script("gateway/claim_subscriptions")
BEGIN_MQTT_SESSION: Final = Script("gateway/begin_mqtt_session")
CLOSE_MQTT_SESSION: Final = Script("gateway/close_mqtt_session")
CLAIM_WILLS: Final = Script("gateway/claim_wills")
FORGET_WILL: Final = Script("gateway/forget_will")
TAKE_WILL: Final = Script("gateway/take_will")
NOTE_RECEIVED: Final = Script("gateway/note_received")
END_MQTT_SESSION: Final = Script("gateway/end_mqtt_session")
BEAT_GATEWAY: Final = Script("gateway/beat_gateway")
RETAIN_MESSAGE: Final = Script("gateway/retain_message")
FIND_RETAINED: Final = PlainCommand("HGET")
"""As a call it shares a write with those of other clients that subscribe."""
NOTE_CLIENT: Final = Script("gateway/note_client")
FORGET_CLIENT: Final = Script("gateway/forget_client")
NOTE_END: Final = Script("gateway/note_end")
FORGET_END: Final = Script("gateway/forget_end")
KEEP_CHOICES: Final = Script("gateway/keep_choices")
