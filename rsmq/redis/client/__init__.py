"""Connections to what a URL names: one server, Sentinel or Cluster; raw ones for the hot path."""
