"""Codecs of payloads: `Broker(codecs=[Zstd(), Encrypt(Keyring.from_env("RSMQ_KEYS"))])`. The extra `rsmq[codecs]`.

`keyring` reads keys and keeps them from being shown, `encrypt` and `zstd` are the two codecs, `reading` undoes what a
command or a job meets, with the keys of its environment. How they follow one another is in `rsmq.model.encoding`.
"""

from rsmq.codecs.encrypt import Encrypt
from rsmq.codecs.keyring import Keyring
from rsmq.codecs.reading import Reading
from rsmq.codecs.zstd import Zstd

__all__ = ["Encrypt", "Keyring", "Reading", "Zstd"]
