"""A master that Sentinel replaces: killed, paused and cut off under load."""
