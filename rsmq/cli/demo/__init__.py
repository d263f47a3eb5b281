"""`rsmq demo`: sends real departures through several worker processes and kills one of them."""
