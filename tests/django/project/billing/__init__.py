"""An app with a model, and handlers that write it."""
