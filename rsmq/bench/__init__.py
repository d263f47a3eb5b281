"""What a message costs: this queue beside the loop that one would write by hand, measured in one run on one server."""
