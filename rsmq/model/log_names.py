"""Names in logs. Keys, tenants, devices and the names of limits may be personal data, such as phone numbers."""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

from rsmq.model.words import LONGEST_SHOWN

MOST_SHOWN: Final = 2
"""Characters of a name that are left when it is shortened; at most a third of it."""

_is_short = False


def shorten_names() -> None:
    """From now on the logs of this process have no whole names: a setting of one broker counts for all."""
    global _is_short
    _is_short = True


def name_in_log(name: str) -> str:
    """A name in quotes, at most 80 characters of it; shortened, its first two characters and four digits of its hash.

    Equal names look equal in all processes. Different ones may look equal as well: the digits do not tell the name.
    """
    if not _is_short:
        return repr(name[:LONGEST_SHOWN])
    digits = blake2b(name.encode(errors="surrogatepass"), digest_size=2).hexdigest()
    return repr(f"{name[: min(MOST_SHOWN, len(name) // 3)]}…{digits}")


def text_in_log(text: str, name: str) -> str:
    """The text of an error that says a name in quotes, with the name as logs show it."""
    return text.replace(repr(name), name_in_log(name)) if name else text
