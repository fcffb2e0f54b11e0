"""In-kernel traces: capture, one merged file for Perfetto, and a summary in numbers. docs/tracing.md teaches how to read
them."""

from __future__ import annotations

from moe_a2a.tracing.capture import Trace, trace
from moe_a2a.tracing.summary import Summary

__all__ = ["Summary", "Trace", "trace"]
