"""`rsmq demo`: real departures through several worker processes, one of which is killed on the way."""
