"""Tests of rsmq.sql on real databases."""
