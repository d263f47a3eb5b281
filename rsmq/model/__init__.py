"""Pure values without I/O, used by every other folder: `message` and its wire format, `keys`, `settings`, the
`partition` of a key, `stream_id`, `clock`, `backoff`, and `log_throttle` for repeated warnings."""
