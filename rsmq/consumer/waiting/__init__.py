"""What waits in this process, and what may start: lanes, the queue, limits and rates."""
