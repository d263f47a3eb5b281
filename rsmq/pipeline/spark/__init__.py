"""Spark itself: its session and progress bars, and its errors in plain words."""
