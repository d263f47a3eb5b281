"""One module per system, run inside that system's own virtual environment: how it publishes and how it works."""
