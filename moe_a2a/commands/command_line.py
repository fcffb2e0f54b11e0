"""Shared by all commands: option types that reject bad values, and one way to exit."""

from __future__ import annotations

import argparse
import io
import math
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

LARGEST = (1 << 31) - 1
MOST_NUMBERS = 1000  # of an option that takes several
ENDING = (signal.SIGTERM, signal.SIGHUP)  # SIGHUP: the terminal was closed; nohup ignores it


class UsageError(Exception):
    """Bad options, or options that name something bad: the command prints this line and exits with 2."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, without argparse's usage text."""
        self.exit(2, f"{self.prog}: {message}; see --help\n")


def integer(least: int, most: int = LARGEST) -> Callable[[str], int]:
    return _number(int, "an integer", least, most)


def seconds(text: str) -> float:
    return _number(float, "a number of seconds", 0.001, 10**9)(text)


def integers(least: int) -> Callable[[str], list[int]]:
    """ "1,2,5" or, with dots for a progression, "1,2,4,...,64" and "8,16,24,...,128"."""
    one = integer(least)

    def parse(text: str) -> list[int]:
        words = text.split(",")
        if "..." not in words:
            return [one(word) for word in words]
        dots = words.index("...")
        numbers, last = [one(word) for word in words[:dots]], [one(word) for word in words[dots + 1 :]]
        if len(numbers) < 2 or len(last) != 1:
            raise argparse.ArgumentTypeError(f"{text!r}: pass at least two numbers before the dots and one after them")
        a, b, *rest = numbers
        is_geometric = a > 0 and b % a == 0 and (not rest or rest[0] * a == b * b)
        if not numbers[-2] < numbers[-1] <= last[0]:
            raise argparse.ArgumentTypeError(f"{text!r}: a progression must ascend")
        while numbers[-1] < last[0] and len(numbers) <= MOST_NUMBERS:
            numbers.append(numbers[-1] * (b // a) if is_geometric else numbers[-1] + b - a)
        if len(numbers) > MOST_NUMBERS:
            raise argparse.ArgumentTypeError(f"{text!r}: more than {MOST_NUMBERS} numbers")
        return numbers[:-1] + last

    return parse


def output_file(text: str | Path) -> Path:
    """A writable file, checked before the work starts: creates its folder, does not touch the file itself."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{str(text)!r} is a folder; pass a file")
    if path.exists() and not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"{str(text)!r} cannot be written")
    try:
        output_folder(path.parent)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{str(text)!r}: {error}") from None
    return path


def output_folder(text: str | Path) -> Path:
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{str(text)!r} cannot be written: {error.strerror}") from None
    return path


def escape_output() -> None:
    """Prints characters that stdout cannot encode with backslashes, as Python does on stderr, instead of raising."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # the caller may have closed or replaced it
        sys.stdout.reconfigure(errors="backslashreplace")


def run(prog: str, command: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Returns the command's exit code. Signals that end it unwind the stack like Ctrl-C, so no temporary folder or child process
    stays."""
    before = {number: signal.signal(number, _ended) for number in ENDING if signal.getsignal(number) != signal.SIG_IGN}
    escape_output()
    try:
        code = command(options)
        if sys.stdout is not None:  # the caller has closed it: >&-
            sys.stdout.flush()
        return code
    except UsageError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # output into `| head`
        _drop_output()
        return 128 + signal.SIGPIPE
    except OSError as error:  # a full disk, too many open files, no temporary folder
        print(f"{prog}: {_words_of(error)}", file=sys.stderr)
        try:
            if sys.stdout is not None:
                sys.stdout.flush()
        except OSError:
            _drop_output()
        return 1
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _drop_output() -> None:
    """Drops what stdout, which cannot be written, still holds: otherwise the interpreter fails to flush it on exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _words_of(error: OSError) -> str:
    why = error.strerror or str(error)
    return why if error.filename is None else f"{error.filename}: {why}"


def _ended(number: int, frame: object) -> NoReturn:
    for ending in ENDING:  # a second signal must not interrupt the clean-up
        signal.signal(ending, signal.SIG_IGN)
    raise SystemExit(128 + number)


def _number(kind: Callable, what: str, least: float, most: float) -> Callable:
    def parse(text: str):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what} from {least} to {most}")
        return value

    return parse
