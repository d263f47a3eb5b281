"""The promises of rsmq, tested through its public API."""
