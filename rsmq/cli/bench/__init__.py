"""`rsmq bench`: the cost of a message in rsmq and in plain redis-py, measured in one run on one server."""
