"""Reads a trace file, independently of the code that wrote it. Files are untrusted."""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path

from moe_a2a.files.json_fields import FieldError
from moe_a2a.tracing import chrome_reader, perfetto_reader
from moe_a2a.tracing.trace_file import TraceFile

# gzip makes our files 14 times smaller; a file that unpacks to far more is meant to fill the memory.
LARGEST_UNPACKED = 200  # times the packed size
CHUNK = 1 << 20


def read(path: str | Path) -> TraceFile:
    """The first byte tells the formats apart: a JSON object or array, or the first packet of a protobuf.

    Raises TraceFileError, and OSError for a file that cannot be opened.
    """
    file = TraceFile(str(path))
    try:
        data = _content(Path(path))
        if data[:1] in (b"{", b"["):
            chrome_reader.parse(data, file)
        elif data[:1] == b"\x0a":
            perfetto_reader.parse(data, file)
        else:
            raise FieldError("it is neither JSON nor a Perfetto trace" if data else "it is empty")
        if not (file.slices or file.about):
            raise FieldError("it is empty: it has no slices")
    except FieldError as error:
        raise file.error(str(error)) from None
    return file


def _content(path: Path) -> bytes:
    if path.exists() and not path.is_file():
        raise FieldError("it is not a regular file")
    data = path.read_bytes()
    return _unpacked(data) if data[:2] == b"\x1f\x8b" else data


def _unpacked(data: bytes) -> bytes:
    limit = LARGEST_UNPACKED * len(data) + CHUNK
    parts, size = [], 0
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as packed:
            while part := packed.read(CHUNK):
                parts.append(part)
                size += len(part)
                if size > limit:
                    raise FieldError(f"it unpacks to more than {LARGEST_UNPACKED} times its {len(data)} bytes")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FieldError(f"its gzip data is cut or damaged: {error}") from None
    return b"".join(parts)
