"""One connection of a client, from its socket to its inbox."""
