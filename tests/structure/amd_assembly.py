"""Reads the assembly that clang writes for an AMD GPU: kernels, their basic blocks, loops and resources."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property


@dataclass(frozen=True)
class Instruction:
    line: int
    opcode: str
    operands: str
    files: tuple[str, ...] = ()  # source files: where it is written, where that is inlined, and so on outwards

    def __str__(self) -> str:
        return f"line {self.line}: {self.opcode} {self.operands}".rstrip()

    @property
    def modifiers(self) -> set[str]:
        """The words after the operands: sc0, sc1, nt, offset:16 ..."""
        return set(self.operands.replace(",", " ").split())

    @property
    def is_load(self) -> bool:
        return self.opcode.startswith(("global_load_", "flat_load_"))

    @property
    def is_store(self) -> bool:
        return self.opcode.startswith(("global_store_", "flat_store_"))

    @property
    def is_system_scope(self) -> bool:
        return {"sc0", "sc1"} <= self.modifiers

    @property
    def loaded(self) -> str:
        """The registers that a load fills."""
        return self.operands.split(",")[0]

    @property
    def stored(self) -> str:
        """The registers that a store writes to memory."""
        return self.operands.split(",")[1].strip()

    @property
    def address(self) -> str:
        """The address that a load reads: its operands after the destination, without modifiers."""
        place = self.operands.split(",", 1)[1].split()
        return " ".join(word for word in place if word not in ("sc0", "sc1", "nt"))

    @property
    def base(self) -> tuple[str, str]:
        """The base of a store's address: the address register and the scalar base, or "off"."""
        operands = [word.strip() for word in self.operands.split(",")]
        return operands[0], operands[2].split()[0]

    @property
    def waits_for_memory(self) -> bool:
        """Whether this is an s_waitcnt after which every load has arrived and every store is done."""
        return self.opcode == "s_waitcnt" and ("vmcnt(0)" in self.operands or self.operands == "0")


# Pairs of scalar registers known to hold 0 or -1.
Flags = frozenset[tuple[str, str]]
NO_FLAGS: Flags = frozenset()


@dataclass
class Block:
    instructions: list[Instruction] = field(default_factory=list)
    successors: list[int] = field(default_factory=list)


@dataclass
class Kernel:
    symbol: str
    blocks: list[Block]
    resources: dict[str, int]

    def instructions(self) -> Iterator[Instruction]:
        yield from self.instructions_of(set(range(len(self.blocks))))

    def instructions_of(self, blocks: set[int]) -> Iterator[Instruction]:
        for index in sorted(blocks):
            yield from self.blocks[index].instructions

    def walk(self, start: str, step: Callable[[Instruction, str], str]) -> None:
        """Takes every path from the first block on, with step(instruction, state) -> state; visits a block once per state.

        The state "stop" ends a path. A branch on a flag that the path itself has set has only one successor: an if and its
        else follow one another, and the flag that enters the second is cleared by the first.
        """
        seen, after = set(), {}  # after: the state after a block, by block and the state before it
        ahead = [(0, start, NO_FLAGS)]
        while ahead:
            here = ahead.pop()
            if here in seen:
                continue
            seen.add(here)
            index, state, flags = here
            if (index, state) not in after:
                after[index, state] = self._state_after(index, state, step)
            state = after[index, state]
            if state != "stop":
                flags, successors = self._ways_on(index, flags)
                ahead.extend((successor, state, flags) for successor in successors)

    def _state_after(self, index: int, state: str, step: Callable[[Instruction, str], str]) -> str:
        for instruction in self.blocks[index].instructions:
            state = step(instruction, state)
            if state == "stop":
                break
        return state

    def _ways_on(self, index: int, flags: Flags) -> tuple[Flags, list[int]]:
        """The flags known after the block, given those known before it, and its successors."""
        if (index, flags) not in self._known_ways:
            known, is_zero = dict(flags), False
            for instruction in self._flag_instructions[index]:
                known, is_zero = _follow_flags(instruction, known, is_zero, self._tested)
            successors = self.blocks[index].successors
            branch = self.blocks[index].instructions[-1].opcode if self.blocks[index].instructions else ""
            if is_zero and branch in ("s_cbranch_vccz", "s_cbranch_vccnz"):  # successors: the next block, the target
                successors = [successors[1 if branch == "s_cbranch_vccz" else 0]]
            self._known_ways[index, flags] = frozenset(known.items()), successors
        return self._known_ways[index, flags]

    @cached_property
    def _known_ways(self) -> dict[tuple[int, Flags], tuple[Flags, list[int]]]:
        return {}

    @cached_property
    def _tested(self) -> set[str]:
        """The pairs of scalar registers that some branch tests."""
        return {test.group(2) for i in self.instructions() if (test := _test_of_flag(i))}

    @cached_property
    def _flag_instructions(self) -> list[list[Instruction]]:
        """For each block, the instructions that can change what is known of flags."""
        tested = frozenset().union(*map(_scalar_registers, self._tested))

        def matters(instruction: Instruction) -> bool:
            operands = instruction.operands
            return (
                "vcc" in operands
                or instruction.opcode.startswith("s_swappc")
                or not tested.isdisjoint(_scalar_registers(operands))
            )

        return [[i for i in block.instructions if matters(i)] for block in self.blocks]

    def loops_with(self, opcode: str) -> list[set[int]]:
        """The innermost loops that contain `opcode`."""
        found = []
        for index, block in enumerate(self.blocks):
            if any(instruction.opcode == opcode for instruction in block.instructions):
                innermost = next((loop for loop in self.loops if index in loop), None)
                if innermost is not None and innermost not in found:
                    found.append(innermost)
        return found

    @cached_property
    def loops(self) -> list[set[int]]:
        """The natural loops, each as the set of its blocks, inner loops before enclosing ones."""
        predecessors: list[list[int]] = [[] for _ in self.blocks]
        for index, block in enumerate(self.blocks):
            for successor in block.successors:
                predecessors[successor].append(index)
        dominators = self._dominators(predecessors)
        loops: dict[int, set[int]] = {}
        for tail, block in enumerate(self.blocks):
            for head in block.successors:
                if not dominators[tail] >> head & 1:
                    continue
                loop, ahead = loops.setdefault(head, {head}), [tail]
                while ahead:
                    index = ahead.pop()
                    if index not in loop:
                        loop.add(index)
                        ahead.extend(predecessors[index])
        return sorted(loops.values(), key=len)

    def _dominators(self, predecessors: list[list[int]]) -> list[int]:
        """The blocks on every path to each block, as bits."""
        everything = (1 << len(self.blocks)) - 1
        dominators = [1] + [everything] * (len(self.blocks) - 1)
        changed = True
        while changed:
            changed = False
            for index in range(1, len(self.blocks)):
                now = everything if predecessors[index] else 0
                for before in predecessors[index]:
                    now &= dominators[before]
                now |= 1 << index
                if now != dominators[index]:
                    dominators[index], changed = now, True
        return dominators


def _test_of_flag(instruction: Instruction) -> re.Match[str] | None:
    """vcc = the lanes whose flag is on (and), or off (andn2)."""
    return re.fullmatch(r"s_(and|andn2)_b64 vcc, exec, (s\[\d+:\d+\])", f"{instruction.opcode} {instruction.operands}")


def _follow_flags(
    instruction: Instruction, known: dict[str, str], is_zero: bool, tested: set[str]
) -> tuple[dict[str, str], bool]:
    """Returns the flags known after the instruction, and whether vcc is known to be zero.

    Any other mention of a register makes it unknown.
    """
    test = _test_of_flag(instruction)
    if test:
        return known, known.get(test.group(2)) == {"and": "0", "andn2": "-1"}[test.group(1)]
    if instruction.opcode.startswith("s_swappc"):
        return {}, False
    if "vcc" in instruction.operands:
        is_zero = False
    mentioned = _scalar_registers(instruction.operands)
    if mentioned:
        known = {pair: value for pair, value in known.items() if not mentioned & _scalar_registers(pair)}
        pair, _, value = instruction.operands.partition(", ")
        if instruction.opcode == "s_mov_b64" and value in ("0", "-1") and pair in tested:
            known[pair] = value
    return known, is_zero


@cache
def _scalar_registers(operands: str) -> frozenset[int]:
    found = re.findall(r"\bs(?:(\d+)\b|\[(\d+):(\d+)\])", operands)
    return frozenset(n for one, first, last in found for n in range(int(one or first), int(one or last) + 1))


def architecture(text: str) -> str:
    return re.search(r'\.amdgcn_target "amdgcn-amd-amdhsa--(\w+)', text).group(1)


def kernels(text: str) -> list[Kernel]:
    """Every kernel of an assembly listing, in order."""
    names = re.findall(r"^\s*\.amdhsa_kernel (\S+)", text, re.M)
    lines = text.splitlines()
    begins = {line.split(":")[0]: n for n, line in enumerate(lines) if re.match(r"[A-Za-z_$][\w$.]*:", line)}
    resources = _resources(text)
    return [Kernel(name, _blocks(lines, begins[name] + 1), resources[name]) for name in names]


def _blocks(lines: list[str], begin: int) -> list[Block]:
    blocks, labels, targets = [Block()], {}, []
    open_end = True  # whether the previous block falls through into the next
    files: tuple[str, ...] = ()
    for number in range(begin, len(lines)):
        code, _, comment = lines[number].partition(";")
        line = code.split("//")[0].strip()
        if re.match(r"\.Lfunc_end\d+:|\.section\b", line):
            break
        if re.match(r"\.loc\b", line):
            files = _files(comment)
        if re.match(r"\.Ltmp\d+:", line):  # debug information, not a branch target
            continue
        label = re.match(r"(\.\w+):", line)
        if label:
            if blocks[-1].instructions or not open_end:
                _start_block(blocks, open_end)
            open_end = True
            labels[label.group(1)] = len(blocks) - 1
        elif line and not line.startswith("."):
            if not open_end:
                _start_block(blocks, open_end)
                open_end = True
            opcode, _, operands = line.partition(" ")
            blocks[-1].instructions.append(Instruction(number + 1, opcode, operands.strip(), files))
            if opcode.startswith(("s_branch", "s_cbranch")):
                targets.append((len(blocks) - 1, operands.strip()))
                _start_block(blocks, falls_through=opcode != "s_branch")
            elif opcode.startswith(("s_endpgm", "s_setpc")):
                open_end = False
    for index, target in targets:
        blocks[index].successors.append(labels[target])
    return blocks


@cache
def _files(location: str) -> tuple[str, ...]:
    """The files in the comment at a .loc: "arch/hip.h:97:3 @[ comm/signal.h:70:7 @[ ... ] ]"."""
    return tuple(re.findall(r"(\S+):\d+:\d+", location))


def _start_block(blocks: list[Block], falls_through: bool) -> None:
    if falls_through:
        blocks[-1].successors.append(len(blocks))
    blocks.append(Block())


def _resources(text: str) -> dict[str, dict[str, int]]:
    """The resources of each kernel, from the metadata at the end of the listing."""
    metadata = text.split("amdhsa.kernels:")[1].split("\namdhsa.")[0]
    fields = {
        "vgpr": "vgpr_count",
        "agpr": "agpr_count",
        "sgpr": "sgpr_count",
        "vgpr_spills": "vgpr_spill_count",
        "sgpr_spills": "sgpr_spill_count",
        "lds": "group_segment_fixed_size",
        "scratch": "private_segment_fixed_size",
    }
    resources = {}
    for entry in re.split(r"\n  - ", metadata)[1:]:
        name = re.search(r"^ *\.name: +'?([^\s']+)", entry, re.M).group(1)
        resources[name] = {
            key: int((re.search(rf"\.{word}: +(\d+)", entry) or [0, 0])[1]) for key, word in fields.items()
        }
    return resources
