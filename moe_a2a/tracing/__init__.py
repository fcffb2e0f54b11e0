"""In-kernel traces: capture, one merged file for Perfetto, a summary in numbers. How to read them: docs/tracing.md."""

from __future__ import annotations

from moe_a2a.tracing.capture import Trace, trace
from moe_a2a.tracing.report import Summary

__all__ = ["Summary", "Trace", "trace"]
