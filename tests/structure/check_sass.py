"""Checks the machine code that nvcc makes of the kernels: check_sass.py dispatch_kernels.o..., with cuobjdump in PATH

An LL word is stored and loaded whole (comm/ll_word.h). PTX promises one access, but ptxas turns a relaxed load of 16 bytes
into one per part that is used, so a new stamp may come with old data. In these kernels only loads of LL words are
system-scope loads from addresses that are known to be global (signals are polled through generic ones).

The kernels that send rows keep their objects in registers. An object whose address a call out of line takes lives on the stack
instead, and the loop that sends rows loads its members from there: 360 bytes once made a combine of 512 tokens 13 % slower.
So do values for which no register is left: they made all-reduces with a codec 8 to 12 % slower.

Nor is a lambda called (see MOE_A2A_INLINED in arch/attributes.h).

A product of a warp group (GMMA) takes the descriptors of its operands from uniform registers. If they are computed in a lane's
registers, since the compiler does not know that all lanes have the same, each product waits for its moves (R2UR).

ptxas 13.0 may pack four float8 into a register and then unpack its byte 0 where byte 2 is meant: line_codec.h did so with pairs.
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
# Among the symbols, where a function that a kernel calls is $kernel$function.
LAMBDA = re.compile(r"^FUNC.*\$(_ZZ\S*Ul\S*)$", re.MULTILINE)
STACK = re.compile(r"Function (\S+?):?\s+REG:\d+ STACK:(\d+)")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?(\w+)")
# An instruction's name, its target and its last operand.
OPERANDS = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?(\S+) (R\d+), (?:.*?, )?([^,;]+?) *;")
BEFORE_A_LOOP = 60  # instructions in which the descriptors of its first product are computed
MOST_MOVES = 4  # to uniform registers, per loop of products
MOST_STACK = {
    "DispatchSend": 64,
    "CombineSend": 64,
    "Dispatch": 128,
    "CodedTwoShot": 128,
}  # bytes, for calls that report a wait


def finds(pattern: re.Pattern[str], listing: str) -> dict[str, list[str]]:
    """Per function, the pattern's group in each line that has it, in order."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in listing.splitlines():
        if match := FUNCTION.match(line):
            name = match[1]
        elif match := pattern.search(line):
            found.setdefault(name, []).append(match[1])
    return found


def loads(listing: str) -> dict[str, Counter[str]]:
    """Per function, how many system-scope loads of each kind."""
    return {name: Counter(kinds) for name, kinds in finds(LOAD, listing).items()}


def problems(of_function: dict[str, Counter[str]]) -> list[str]:
    return [
        f"{name}: {count} x {load}, part of an LL word; {WHOLE} expected"
        for name, kinds in of_function.items()
        for load, count in kinds.items()
        if load != WHOLE
    ]


def moves(listing: str) -> dict[str, int]:
    """Per function with products of warp groups, the moves to uniform registers before and among them."""
    found = {}
    for name, ops in finds(INSTRUCTION, listing).items():
        if products := [i for i, op in enumerate(ops) if op.endswith("GMMA")]:
            found[name] = ops[max(0, products[0] - BEFORE_A_LOOP) : products[-1]].count("R2UR")
    return found


def move_problems(of_function: dict[str, int]) -> list[str]:
    return [
        f"{name}: {count} moves to uniform registers among its products > {MOST_MOVES}; is the warp's number broadcast?"
        for name, count in of_function.items()
        if count > MOST_MOVES
    ]


def stacks(usage: str) -> dict[str, int]:
    """Bytes of stack of each kernel in MOST_STACK, from `cuobjdump -res-usage`. A mangled name has each part's length before it."""
    found: dict[str, int] = {}
    for function, size in STACK.findall(" ".join(usage.split())):
        for name in MOST_STACK:
            if re.search(rf"{len(name)}{name}[EI]", function):  # I: of a template, whose largest counts
                found[name] = max(found.get(name, 0), int(size))
    return found


def stack_problems(of_kernel: dict[str, int]) -> list[str]:
    return [
        f"{name}: {size} bytes of stack > {MOST_STACK[name]}; which object does a call take by reference?"
        for name, size in of_kernel.items()
        if size > MOST_STACK[name]
    ]


def lambda_problems(symbols: str) -> list[str]:
    return [f"{name}: a lambda that is called; is it MOE_A2A_INLINED?" for name in LAMBDA.findall(symbols)]


def unpack_problems(listing: str) -> list[str]:
    """Conversions from float8 of registers that the instructions before have packed from two pairs."""
    count: Counter[str] = Counter()
    name, packed = "", set()
    for line in listing.splitlines():
        if match := FUNCTION.match(line):
            name, packed = match[1], set()
        elif match := OPERANDS.match(line):
            op, target, last = match.groups()
            is_packed = last in packed
            count[name] += is_packed and ".E4M3.UNPACK" in op
            merges = ".E4M3.F32.PACK_AB_MERGE_C" in op and last != "RZ"
            (packed.add if merges or (is_packed and "MOV" in op) else packed.discard)(target)
    return [
        f"{name}: {number} x float8 from a register of four, see line_codec.h"
        for name, number in count.items()
        if number
    ]


def of_file(path: str) -> tuple[dict[str, Counter[str]], dict[str, int], dict[str, int], list[str]]:
    sass, usage, symbols = (
        subprocess.run(["cuobjdump", option, path], capture_output=True, text=True, check=True).stdout
        for option in ("-sass", "-res-usage", "-symbols")
    )
    return loads(sass), moves(sass), stacks(usage), [*lambda_problems(symbols), *unpack_problems(sass)]


def main(arguments: list[str]) -> int:
    num_words, num_pipelines, measured, found = 0, 0, set(), []
    with ProcessPoolExecutor() as pool:
        for path, (loads_of, moves_of, stack_of, others) in zip(arguments, pool.map(of_file, arguments), strict=True):
            num_words += sum(kinds[WHOLE] for kinds in loads_of.values())
            num_pipelines += len(moves_of)
            measured |= stack_of.keys()
            all_problems = [*problems(loads_of), *move_problems(moves_of), *stack_problems(stack_of), *others]
            found += [f"{path}: {problem}" for problem in all_problems]
    if num_words == 0:
        found.append(f"no load of an LL word in {len(arguments)} files")
    if num_pipelines == 0:
        found.append(f"no product of a warp group in {len(arguments)} files")
    found += [f"no {name} in {len(arguments)} files" for name in MOST_STACK.keys() - measured]
    good = f"{num_words} loads of LL words, each one access; {num_pipelines} loops of products ({len(arguments)} files)"
    print("\n".join(found) if found else good)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
