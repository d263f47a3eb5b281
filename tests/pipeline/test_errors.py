"""What Spark says becomes one line that says what to do."""

from __future__ import annotations

import pytest
from pyspark.errors import PySparkException

from rsmq.errors import BrokerUnavailable, ConfigError, RsmqError
from rsmq.pipeline.format.offsets import DataLoss
from rsmq.pipeline.spark.errors import spark_errors

STACK = (
    "An error occurred while calling o1.save.\n: org.apache.spark.SparkException: Job aborted.\n\tat org.X(Y.scala:1)\n"
)


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        (f"{STACK}rsmq.errors.ConfigError: give one\n\tat x", ConfigError, "give one"),
        (f"{STACK}rsmq.errors.BrokerUnavailable: no answer\n", BrokerUnavailable, "no answer"),
        (f"{STACK}rsmq.pipeline.format.offsets.DataLoss: t.0: expected 2\n", DataLoss, "t.0: expected 2"),
        (f"{STACK}rsmq.errors.TooLarge: 9 bytes\n", RsmqError, "9 bytes"),
        (f"{STACK}[FAILED_READ_FILE] file:///a/b.parquet is not", RsmqError, "file:///a/b.parquet cannot be read"),
        (f"{STACK}java.io.IOException: No space left on device\n", RsmqError, "the disk is full: free some space"),
        (f"{STACK}java.io.FileNotFoundException: x\n", RsmqError, "not at the same time as `rsmq pipeline compact`"),
        (
            f"{STACK}AccessControlException: Permission denied\n",
            RsmqError,
            "this user has no permission to read or write there",
        ),
        (
            f"{STACK}Traceback\n  File x\nNameError: name 'y'\n SQLSTATE: 1",
            RsmqError,
            "Spark failed: NameError: name 'y'",
        ),
        (
            "[STREAM_FAILED] terminated with exception: Python worker failed to connect back. SQLSTATE: XXKST",
            RsmqError,
            "not ready within ten seconds, as on a machine with too much other work: run it again",
        ),
        (
            """[CAST_INVALID_INPUT] The value '010-1' of the type "STRING" cannot be cast. SQLSTATE: 22018\nat x""",
            RsmqError,
            r"""^Spark failed: \[CAST_INVALID_INPUT\] The value \.\.\. of the type "STRING" cannot be""",
        ),
        ("[SOMETHING_ELSE] happened\nand more", RsmqError, r"Spark failed: \[SOMETHING_ELSE\] happened"),
    ],
)
def test_a_spark_error_becomes_one_line(text: str, kind: type[RsmqError], message: str) -> None:
    """The reason inside a page of Java stack, as an error of the right kind."""
    with pytest.raises(kind, match=message) as caught, spark_errors():
        raise PySparkException(text)
    assert "\n" not in str(caught.value)
