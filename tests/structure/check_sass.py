"""Checks the machine code that nvcc makes of the kernels: check_sass.py dispatch_kernels.o..., with cuobjdump in PATH

An LL word is stored and loaded whole (comm/ll_word.h). PTX promises one access, but ptxas turns a relaxed load of 16 bytes
into one per part that is used, so a new stamp may come with old data. In these kernels only loads of LL words are
system-scope loads from addresses that are known to be global (signals are polled through generic ones).

The kernels that send rows keep their objects in registers. An object whose address a call out of line takes lives on the stack
instead, and the loop that sends rows loads its members from there: 360 bytes once made a combine of 512 tokens 13 % slower.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

FUNCTION = re.compile(r"^\s*Function : (\S+)")
LOAD = re.compile(r"\b(LDG\.E\S*\.SYS)\b")
WHOLE = "LDG.E.128.STRONG.SYS"
STACK = re.compile(r"Function (\S+?):?\s+REG:\d+ STACK:(\d+)")
MOST_STACK = {"DispatchSend": 64, "CombineSend": 64, "Dispatch": 128}  # bytes, for calls that report a wait


def loads(listing: str) -> dict[str, Counter[str]]:
    """Per function, how many system-scope loads of each kind."""
    found: dict[str, Counter[str]] = {}
    name = ""
    for line in listing.splitlines():
        if match := FUNCTION.match(line):
            name = match[1]
        elif match := LOAD.search(line):
            found.setdefault(name, Counter())[match[1]] += 1
    return found


def problems(of_function: dict[str, Counter[str]]) -> list[str]:
    return [
        f"{name}: {count} x {load}, part of an LL word; {WHOLE} expected"
        for name, kinds in of_function.items()
        for load, count in kinds.items()
        if load != WHOLE
    ]


def stacks(usage: str) -> dict[str, int]:
    """Bytes of stack of each kernel in MOST_STACK, from `cuobjdump -res-usage`. A mangled name has each part's length before it."""
    found = {}
    for function, size in STACK.findall(" ".join(usage.split())):
        found |= {name: int(size) for name in MOST_STACK if f"{len(name)}{name}E" in function}
    return found


def stack_problems(of_kernel: dict[str, int]) -> list[str]:
    return [
        f"{name}: {size} bytes of stack > {MOST_STACK[name]}; which object does a call take by reference?"
        for name, size in of_kernel.items()
        if size > MOST_STACK[name]
    ]


def of_file(path: str) -> tuple[dict[str, Counter[str]], dict[str, int]]:
    sass, usage = (
        subprocess.run(["cuobjdump", option, path], capture_output=True, text=True, check=True).stdout
        for option in ("-sass", "-res-usage")
    )
    return loads(sass), stacks(usage)


def main(arguments: list[str]) -> int:
    num_words, measured, found = 0, set(), []
    with ProcessPoolExecutor() as pool:
        for path, (of_function, of_kernel) in zip(arguments, pool.map(of_file, arguments), strict=True):
            num_words += sum(kinds[WHOLE] for kinds in of_function.values())
            measured |= of_kernel.keys()
            found += [f"{path}: {problem}" for problem in [*problems(of_function), *stack_problems(of_kernel)]]
    if num_words == 0:
        found.append(f"no load of an LL word in {len(arguments)} files")
    found += [f"no {name} in {len(arguments)} files" for name in MOST_STACK.keys() - measured]
    print("\n".join(found) if found else f"{num_words} loads of LL words in {len(arguments)} files, each one access")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
