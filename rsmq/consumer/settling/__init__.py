"""From the end of a call to the server: acknowledge, park, bury; outputs."""
