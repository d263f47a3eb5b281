"""Avro records: a class with a schema. What is written says its schema, so a reader may have a newer one."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from pydantic import TypeAdapter, ValidationError

from rsmq.errors import CannotDecode, ConfigError, Malformed, NotJson
from rsmq.model.error_text import explain
from rsmq.model.formats import Decoder, Format, register
from rsmq.model.interrupt import is_from_signal

C = TypeVar("C", bound=type)
Schema = Mapping[str, Any]

TYPE: Final = "application/avro"
MARKER: Final = b"\xc3\x01"
"""Of Avro's single-object encoding: then 8 bytes of the schema's fingerprint, then the value."""
HEAD: Final = 10


def avro_record(schema: Schema, *, older: Sequence[Schema] = ()) -> Callable[[C], C]:
    """Payloads of the decorated class are Avro: `@avro_record({"type": "record", "name": "Order", "fields": [...]})`.

    The class is a dataclass, a pydantic model or a TypedDict with the fields of the schema. `older`: the schemas with
    which other publishers may write; what they wrote is read as the new one, by Avro's rules of schema resolution. A
    message of a schema that is not among these waits, like one without its key: its reader needs an update. Needs the
    package fastavro. Raises ConfigError.
    """
    avro = library()
    try:
        parsed = avro.parse_schema(dict(schema))
        known = {fingerprint(avro, each): avro.parse_schema(dict(each)) for each in (*older, schema)}
    except Exception as error:  # fastavro raises several kinds
        raise ConfigError(f"avro_record: the schema cannot be used ({error})") from None
    own = fingerprint(avro, schema)

    def decorate(kind: C) -> C:
        adapter = TypeAdapter[Any](kind)

        def encode(value: Any) -> tuple[bytes, str]:
            stream = io.BytesIO()
            stream.write(MARKER + own)
            try:
                avro.schemaless_writer(stream, parsed, adapter.dump_python(value, warnings=False))
            except Exception as error:  # what does not fit the schema, of several kinds
                problem = f"a payload of type {kind.__name__} does not fit its schema{at(error)}"
                raise NotJson("", problem, "publish what the schema has a form for, or change both") from None
            return stream.getvalue(), TYPE

        def decode(data: bytes) -> Any:
            if len(data) < HEAD or not data.startswith(MARKER):
                raise Malformed("the payload is no Avro object: it does not begin with c301 and a fingerprint")
            written = known.get(data[2:HEAD])
            if written is None:
                raise CannotDecode(f"schema {data[2:HEAD].hex()}", f"add it to older=[...] of {kind.__name__}")
            stream = io.BytesIO(data)
            stream.seek(HEAD)
            try:
                value = adapter.validate_python(avro.schemaless_reader(stream, written, parsed))
            except BaseException as error:  # of fastavro, of pydantic, and of a validator of the user
                if is_from_signal(error):
                    raise
                raise Malformed(misfit(kind, adapter, error)) from None
            if stream.tell() != len(data):
                raise Malformed(f"the payload does not fit {kind.__name__}: {len(data) - stream.tell()} bytes too many")
            return value

        register(kind, Format(encode, json_decoder(kind, adapter), TYPE, {TYPE: decode}))
        return kind

    return decorate


def json_decoder(kind: type, adapter: TypeAdapter[Any]) -> Decoder:
    """Reads the class as JSON: of a publisher that knows no Avro, or of the time before it."""

    def decode(data: bytes) -> Any:
        try:
            return adapter.validate_json(data)
        except BaseException as error:  # of pydantic, and of a validator of the user
            if is_from_signal(error):
                raise
            raise Malformed(misfit(kind, adapter, error)) from None

    return decode


def at(error: Exception) -> str:
    """The field at the end of an error of fastavro, whose text has the value before it; empty if it does not say."""
    field = re.search(r" on field ([A-Za-z0-9_.]{1,100})$", str(error))
    return f" at {field[1]}" if field else ""


def misfit(kind: type, adapter: TypeAdapter[Any], error: BaseException) -> str:
    """An error of a reader as one line, without values: of fastavro and of a validator of the user its type."""
    if isinstance(error, ValidationError):
        return explain(error, lambda: adapter.core_schema)
    return f"the payload does not fit {kind.__name__}: {type(error).__name__}"


def fingerprint(avro: Any, schema: Schema) -> bytes:
    """The CRC-64-AVRO of a schema's canonical form, the lowest byte first."""
    canonical = avro.schema.to_parsing_canonical_form(dict(schema))
    return bytes.fromhex(avro.schema.fingerprint(canonical, "CRC-64-AVRO"))


def library() -> Any:
    """The package. Raises ConfigError without it."""
    try:
        import fastavro
        import fastavro.schema
    except ImportError:
        raise ConfigError("avro_record needs the package fastavro: pip install 'rsmq[avro]'") from None
    return fastavro
