"""Payloads as columns with types: the schema of a pydantic model or a dataclass, and what does not fit it apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import PydanticUserError, TypeAdapter
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql import types as T  # noqa: N812

from rsmq.errors import ConfigError

CORRUPT: Final = "__rsmq_bad"
FORMATS: Final[Mapping[str, T.DataType]] = {"date-time": T.TimestampType(), "date": T.DateType()}
SIMPLE: Final[Mapping[str, T.DataType]] = {
    "string": T.StringType(), "integer": T.LongType(), "number": T.DoubleType(), "boolean": T.BooleanType(),
}  # fmt: skip


def typed_rows(rows: DataFrame, model: Any, *, payload: str = "payload", bad: str = "bad") -> DataFrame:
    """Rows of a topic with the JSON in `value` as a struct.

    `model`: a pydantic model, a dataclass or a TypedDict. Column `payload` has its fields, and is null where the value
    does not fit: no JSON, another type, or a required field that is missing. Then column `bad` has the value as text:
    one bad message does not end a query. `rows.where("bad IS NULL").select("payload.*")` are the good ones.
    """
    schema = schema_of(model)
    whole = T.StructType([*schema.fields, T.StructField(CORRUPT, T.StringType())])
    text = F.col("value").cast("string")
    nullable = T.StructType([T.StructField(each.name, each.dataType) for each in whole.fields])
    parsed = F.from_json(text, nullable, {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": CORRUPT})
    found = rows.withColumn(payload, parsed)
    is_bad = F.col(payload).isNull() | F.col(f"{payload}.{CORRUPT}").isNotNull() | lacks_some(F.col(payload), schema)
    is_bad = is_bad | F.coalesce(F.ltrim(text).startswith("["), F.lit(False))  # Spark takes the first of a list
    return found.withColumn(bad, F.when(is_bad, F.coalesce(text, F.lit("")))).withColumn(
        payload, F.when(~is_bad, F.col(payload).dropFields(CORRUPT))
    )


def lacks_some(value: Column, kind: T.DataType) -> Column:
    """Whether a value lacks a field that must be there, also in what is inside of it. Never null."""
    if isinstance(kind, T.ArrayType):
        found = F.exists(value, lambda each: lacks_some(each, kind.elementType))
    elif isinstance(kind, T.MapType):
        found = F.exists(F.map_values(value), lambda each: lacks_some(each, kind.valueType))
    elif isinstance(kind, T.StructType):
        found = F.lit(False)
        for each in kind.fields:
            field = value.getField(each.name)
            if not each.nullable:
                found = found | field.isNull()
            if isinstance(each.dataType, T.ArrayType | T.MapType | T.StructType):
                found = found | lacks_some(field, each.dataType)
    else:
        return F.lit(False)
    return F.when(value.isNull(), F.lit(False)).otherwise(F.coalesce(found, F.lit(False)))


def schema_of(model: Any) -> T.StructType:
    """The columns of a pydantic model, a dataclass or a TypedDict. Raises ConfigError for what has no fields.

    Names are those of the JSON. A required field that may not be null is not nullable. What has no single type in JSON
    (a union, any value) becomes text.
    """
    try:
        schema = TypeAdapter(model).json_schema(mode="validation")
    except PydanticUserError as error:
        raise ConfigError(f"{model!r} has no schema: {error.message}") from None
    kind = spark_type(schema, schema.get("$defs", {}), ())
    if not isinstance(kind, T.StructType):
        raise ConfigError(f"{model!r} has no fields: give a pydantic model or a dataclass")
    return kind


def spark_type(schema: Mapping[str, Any], known: Mapping[str, Any], inside: tuple[str, ...]) -> T.DataType:
    """A JSON schema as a type of Spark. `inside`: the definitions that it is part of."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name in inside:
            raise ConfigError(f"{name} contains itself: Spark has no such type")
        return spark_type(known[name], known, (*inside, name))
    if "anyOf" in schema:
        others = [each for each in schema["anyOf"] if each.get("type") != "null"]
        return spark_type(others[0], known, inside) if len(others) == 1 else T.StringType()
    kind = schema.get("type")
    if kind == "array" and "items" in schema:
        return T.ArrayType(spark_type(schema["items"], known, inside))
    if kind == "object" and "properties" in schema:
        required = schema.get("required", ())
        return T.StructType(
            [
                T.StructField(name, spark_type(each, known, inside), name not in required or is_optional(each))
                for name, each in schema["properties"].items()
            ]
        )
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return T.MapType(T.StringType(), spark_type(schema["additionalProperties"], known, inside))
    return FORMATS.get(schema.get("format", ""), SIMPLE.get(str(kind), T.StringType()))


def is_optional(schema: Mapping[str, Any]) -> bool:
    """Whether a value may be null."""
    return any(each.get("type") == "null" for each in schema.get("anyOf", ()))
