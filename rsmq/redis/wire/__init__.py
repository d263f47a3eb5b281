"""Bytes and addresses: URLs, slots of a cluster, replies. No connection."""
