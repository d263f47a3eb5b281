"""Which members are alive and which of them owns a partition.

`heartbeat` is one thread per process: it renews leases (`lease`), the keys that other members read (`registration`) and
messages in flight, and measures the delay of the event loop (`loop_lag`). `presence` is a second thread with a
subscription: when the process dies, its sockets close and other members notice. The other direction is `membership`:
it reads the group, `liveness` decides who is alive, and `assignment` computes the owner of each partition.
"""
