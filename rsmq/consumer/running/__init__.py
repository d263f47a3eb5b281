"""From the queue to the end of a handler's call."""
