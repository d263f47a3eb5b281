"""`rsmq pipeline`: archive, compact, replay, send, report, on Spark. What they do is in `rsmq/pipeline`.

Spark is an optional extra and slow to import: nothing of it is loaded before one of these commands runs.
"""

from collections.abc import Callable

from rsmq.cli.option import noun
from rsmq.cli.pipeline.archive import archive
from rsmq.cli.pipeline.compact import compact
from rsmq.cli.pipeline.replay import replay
from rsmq.cli.pipeline.report import report
from rsmq.cli.pipeline.send import send

EXAMPLES: dict[Callable[..., None], str] = {
    archive: "rsmq pipeline archive orders --to /data/archive --every PT1M",
    compact: "rsmq pipeline compact /data/archive",
    replay: "rsmq pipeline replay orders --from /data/archive --to orders-again --dry-run",
    send: "rsmq pipeline send audience.parquet --to alerts --device device_id",
    report: "rsmq pipeline report --from /data/archive --since 2026-01-31T00:00:00Z",
}

app = noun("Spark: archive, compact, replay, send, report.")
for command, example in EXAMPLES.items():
    app.command(epilog=f"Example: {example}")(command)
