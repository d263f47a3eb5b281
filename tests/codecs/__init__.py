"""Compression, encryption and the keys."""
