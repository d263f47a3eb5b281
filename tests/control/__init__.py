"""Tests of `rsmq.control`: one message under command."""
