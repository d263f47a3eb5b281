"""The MQTT gateway: connections of MQTT clients, whose messages land in topics and whose inboxes wait on the server.

Without I/O: `packet` (the control packets), `properties`, `decode` and `encode` (bytes and packets), `topic_filter` and
`filter_tree` (what matches what), `machine` (the rules of one connection), `inbound` (what a client has published).
"""
