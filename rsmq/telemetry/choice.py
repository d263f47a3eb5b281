"""The choice of what is traced at all, made before there is a span."""

from __future__ import annotations

from random import random
from typing import Final

from opentelemetry import context
from opentelemetry.trace import get_current_span

get_current: Final = context.get_current


class Choice:
    """Of everything (share 1) OpenTelemetry's sampler decides, and tells the handlers.

    Below that we decide before a span is made: inside of a span as that one, else by chance. What is not chosen carries
    no context, so handlers begin no trace of their own.
    """

    __slots__ = ("is_all", "share")

    def __init__(self, share: float) -> None:
        self.share, self.is_all = share, share >= 1

    def of_publish(self) -> bool:
        """Whether a publish gets a span."""
        if self.is_all:
            return True
        if not get_current():
            return random() < self.share
        here = get_current_span().get_span_context()
        return here.trace_flags.sampled if here.is_valid else random() < self.share
