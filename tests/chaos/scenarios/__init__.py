"""The scenarios, by what they strike: workers, handlers, the server, the line, the disk, the clock, the keys."""
