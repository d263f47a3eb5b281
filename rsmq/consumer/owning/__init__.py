"""Which partitions this member has: decide, open a lane, close it."""
