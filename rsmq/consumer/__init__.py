"""The data path of one handler, from the stream to the settlement.

A message's way: the `rebalancer` (or `shared` distribution) decides which partitions this member has, and
`lane_lifecycle` opens a `lane` for each. The `reclaimer` takes over what is pending there, then a `fetcher` (made by
`fetchers`) reads new messages into the `queue`, which decides by key, suspicion and `limits` what may start (a
`group_rate` takes blocks of starts from the server; an `allowance` is what it has of one name). The `runner` (for
batches `batch_runner`; `execution` chooses) takes it from there with a `pool` of tasks and calls the handler; while
calls end in their first step (`handler.first_step`), `task_slot` makes no messages. The `settler` acknowledges, parks
or buries it; the `retry_poller` brings parked messages back. `consumer` starts and stops these roles, which share one
`context`.
"""
