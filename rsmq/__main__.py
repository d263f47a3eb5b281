"""`python -m rsmq` is the command `rsmq`."""

from rsmq.cli import main

main()
