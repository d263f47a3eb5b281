"""The codecs of the backends `retrying` and `outbox`."""

from rsmq.codecs import Encrypt, Keyring

codecs = [Encrypt(Keyring({"k1": b"1" * 32}), required=True)]
