"""The state that the gateways of a fleet share on the server."""
