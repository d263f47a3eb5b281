"""What the gateways of a fleet share on the server."""
