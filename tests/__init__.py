"""Tests of rsmq. A package, so that `tests.servers` can be imported from any of them."""
