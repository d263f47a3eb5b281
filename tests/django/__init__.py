"""Tests of the Django backend."""
