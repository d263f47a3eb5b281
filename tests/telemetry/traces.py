"""A tracer provider that keeps what has ended in memory."""

from __future__ import annotations

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Sampler

from tests.patience import until


class Traces:
    """A tracer provider, and the spans that have ended."""

    def __init__(self, sampler: Sampler = ALWAYS_ON, id_generator: IdGenerator | None = None) -> None:
        self._memory = InMemorySpanExporter()
        self.provider = TracerProvider(sampler=sampler, id_generator=id_generator)
        self.provider.add_span_processor(SimpleSpanProcessor(self._memory))

    def named(self, name: str) -> list[ReadableSpan]:
        """Those with a name, in the order of their ends."""
        return [span for span in self._memory.get_finished_spans() if span.name == name]

    async def expect(self, name: str, count: int = 1) -> list[ReadableSpan]:
        """Wait for so many."""
        await until(lambda: len(self.named(name)) >= count, f"{count} spans {name!r}")
        return self.named(name)
