"""MQTT without I/O: bytes, packets, the rules of one connection, topic filters."""
