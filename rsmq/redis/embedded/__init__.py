"""A Valkey server from a wheel, for development and tests, and the process that stops it with its last user."""
