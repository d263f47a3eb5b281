"""`python -m rsmq` is the command `rsmq`."""

from rsmq.cli import main

if __name__ == "__main__":  # a process handler imports this module in its process
    main()
