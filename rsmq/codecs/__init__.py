"""Codecs of payloads: `Broker(codecs=[Zstd(), Encrypt(Keyring.from_env("RSMQ_KEYS"))])`. The extra `rsmq[codecs]`.

`keyring` reads keys and keeps them from being shown, `encrypt` and `zstd` are the two codecs, `reading` undoes what a
command or a job meets, with the keys of its environment. `offload` puts large payloads into a store. `avro` gives a
class the format Avro. How codecs follow one another is in `rsmq.model.encoding`, the other formats are in
`rsmq.model.formats`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rsmq.codecs.avro import avro_record
    from rsmq.codecs.encrypt import Encrypt
    from rsmq.codecs.keyring import Keyring
    from rsmq.codecs.offload import Offload
    from rsmq.codecs.zstd import Zstd
    from rsmq.model.body import BodyStore
else:
    from rsmq.model.lazy import loading

    __getattr__, __dir__ = loading(
        __name__,
        {
            "avro": "avro_record", "encrypt": "Encrypt", "keyring": "Keyring", "offload": "BodyStore Offload",
            "zstd": "Zstd",
        },
    )  # fmt: skip

__all__ = ["BodyStore", "Encrypt", "Keyring", "Offload", "Zstd", "avro_record"]
