"""Figures of the house: rooms, floors and arrows of the code, lines and calls of the ways that a message takes.

They are shown, and explained where they rise. None of them is a gate: a test that counts would be met by a trick.
"""
