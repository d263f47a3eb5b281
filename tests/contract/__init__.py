"""What rsmq promises, one function a promise, through its public API."""
