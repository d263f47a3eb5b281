"""`manage.py rsmq`."""
