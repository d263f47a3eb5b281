"""Handlers and schedules of a user, checked when it is registered. No I/O.

A `router` collects handlers and schedules. `handler` builds one from its `options`, its `signature`, the `payload`
decoder of its annotation and its `dependencies`. `middleware` wraps the calls, `first_step` begins one; `retry`
decides what happens to a message after its handler, and `failure` writes its error down; `rate_limit` and `schedule`
compute when handlers and schedules may run.
"""
