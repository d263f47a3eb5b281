"""What is wrong with the queues."""
