"""The report: counts messages with Spark, reads the state of the server, and makes one HTML page."""
