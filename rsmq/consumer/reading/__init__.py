"""From the stream to the queue: take over what is pending, then read new messages."""
