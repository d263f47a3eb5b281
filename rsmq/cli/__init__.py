"""The command `rsmq`: thin commands over the library, a file for each noun.

`quick.py` answers what needs no command, from `index.py`; `app.py` is the command line, and runs the others.
`parameters.py` has shared options and the parsers of their values, `connection.py` asks the server, `output.py` prints
lines and JSON, and `tables.py` prints tables. `top_screen.py` draws `rsmq top`. `load_broker.py` loads a
worker's broker and `serve.py` runs it. A command imports only what it needs itself.

Exit codes: 0 done, 1 failed or a negative answer, 2 wrong use or configuration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rsmq.cli.app import COMMANDS, main, make_app
else:
    from rsmq.model.lazy import loading

    __getattr__, __dir__ = loading(__name__, {"app": "COMMANDS main make_app"})

__all__ = ["COMMANDS", "main", "make_app"]
