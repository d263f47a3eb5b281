"""A program for `test_forks`: says what it was given, then ends as its first argument says."""

from __future__ import annotations

import json
import os
import sys
import time

if __name__ == "__main__":
    environment = {name: text for name, text in os.environ.items() if name != "LC_CTYPE"}  # Python may add that
    print(json.dumps([sys.argv[1:], environment, os.getcwd(), os.getsid(0) == os.getpid()]), flush=True)
    match sys.argv[1]:
        case "raise":
            raise ValueError("on purpose")
        case "wait":
            time.sleep(600)
        case code:
            sys.exit(int(code))
