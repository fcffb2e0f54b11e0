"""Checks the AMD compiler's output for the kernels: check_isa.py dispatch_kernels.gfx942.s...

If compilation drops a release or acquire, data is lost once in a million calls, and no NVIDIA GPU, CPU or
emulator shows it. So the rules read the assembly. They know the forms of gfx942 and gfx950; on other
architectures (gfx90a has no scope bits) only resources, row accesses and LL words are checked.

An LL word (comm/ll_word.h) is stored and polled by the same instructions as a signal, but needs neither release nor
acquire. An instruction's source line distinguishes the two: listings are made with line tables. An instruction without a
line counts as a signal.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from amd_assembly import Instruction, Kernel, architecture, kernels

# Kernels of every step: they must not use scratch memory.
HOT = {"Dispatch", "DispatchSend", "DispatchRecv", "Combine", "CombineSend", "CombineRecv"}
# Those through which every byte of a row passes at the full rate of the link: in these loops not even a
# scalar register may be spilled to a vector register. (Once per row is allowed: one kernel sends whole rows and pieces,
# plain or quantised, and the addresses of all these forms do not fit into a hundred registers.)
ROW_PATH = {"DispatchSend", "CombineRecv"}
# Kernels that copy rows, and kernels that read and write them, in pieces of 16 bytes.
ROW_COPIERS = {"Dispatch", "DispatchSend"}
ROW_ADDERS = {"Combine", "CombineRecv"}
# Kernels that must multiply on the matrix units.
MULTIPLIERS = {"GroupedGemm"}
# The kernels that a family's listing must contain.
FAMILIES = {
    "dispatch_kernels": {"Dispatch", "DispatchSend", "DispatchRecv"},
    "combine_kernels": {"Combine", "CombineSend", "CombineRecv"},
    "coded_combine_kernels": {"CodedCombine", "CodedCombineSend"},
    "simulated_experts_kernels": {"SimulatedCombine", "SimulatedCombineSend"},
    "grouped_gemm_kernels": MULTIPLIERS,
    "collective_kernels": {"OneShotWords"},
    "coded_collective_kernels": {"CodedTwoShot"},
}
# Kernels that write data and then raise signals for it.
SIGNALLERS = {"Dispatch", "DispatchSend", "Combine", "CombineSend", "CodedCombine", "CodedCombineSend"}
SIGNALLERS |= FAMILIES["simulated_experts_kernels"]
# Kernels that send LL words, and kernels that poll them.
LL_SENDERS = SIGNALLERS | {"OneShotWords"}
LL_RECEIVERS = {
    "Dispatch",
    "DispatchRecv",
    "Combine",
    "CombineRecv",
    "CodedCombine",
    "SimulatedCombine",
    "OneShotWords",
}
# Spins that wait for a bare word and so need no acquire: the two sides of a volley.
BARE_SPINS = {"AlignClocks": 2}
# Kernels that also spin on 32-bit counts of their own device, at device scope (moe/experts/stored_tiles.h).
TILE_COUNTERS = {"ProductCombineSend"}


def short_name(kernel: Kernel) -> str:
    """kernel_entry<Traced<DispatchSend, ...>> is DispatchSend, kernel_entry<GroupedGemm<...>> is GroupedGemm."""
    found = re.search(r"kernel_entryI.*?\d(?!Traced)([A-Z][A-Za-z]*?)(?:E|INS|ILNS)", kernel.symbol)
    return found.group(1) if found else kernel.symbol


def finds_a_peer(instruction: Instruction) -> bool:
    """A load of the address of a rank's heap, by a failed wait that tells the others. The word never changes."""
    return bool(instruction.files) and instruction.files[0].endswith("csrc/comm/heap_view.h")


def is_of_ll_word(instruction: Instruction) -> bool:
    """An access from ll_word.h, or from the target's atomics for it."""
    if not (instruction.is_load or instruction.is_store):
        return False
    user = next((file for file in instruction.files if "csrc/arch/" not in file), "")
    return user.endswith("csrc/comm/ll_word.h")


def is_signal_store(instruction: Instruction) -> bool:
    """A signal has 64 bits; 64-bit stores with a scope are either signals or LL words."""
    if is_of_ll_word(instruction):
        return False
    return instruction.is_store and instruction.opcode.endswith("_dwordx2") and "sc1" in instruction.modifiers


def is_data_store(instruction: Instruction) -> bool:
    return instruction.is_store and "sc1" not in instruction.modifiers


def is_system_write_back(instruction: Instruction) -> bool:
    return instruction.opcode == "buffer_wbl2" and instruction.is_system_scope


def is_system_invalidate(instruction: Instruction) -> bool:
    return instruction.opcode == "buffer_inv" and instruction.is_system_scope


def check_resources(kernel: Kernel) -> list[str]:
    used = [f"{kernel.resources[name]} {name}" for name in ("vgpr_spills", "scratch") if kernel.resources[name] > 0]
    if short_name(kernel) in ROW_PATH and kernel.resources["sgpr_spills"] > 0:
        used += [str(i) for i in _parking_in_row_loops(kernel)][:1]
    used += [str(i) for i in kernel.instructions() if i.opcode.startswith("scratch_")][:1]
    return [f"registers do not suffice: {', '.join(used)}"] if used else []


def _parking_in_row_loops(kernel: Kernel) -> list[Instruction]:
    """Lane accesses of vector registers in the innermost loops that read or write rows in pieces of 16 bytes.

    Rows are reached by global accesses; a flat store of 16 bytes is a record of the trace, once per row.
    """
    loops, rows = kernel.loops, set()
    for index, block in enumerate(kernel.blocks):
        innermost = next((loop for loop in loops if index in loop), None)
        wide = any(i.opcode in ("global_load_dwordx4", "global_store_dwordx4") for i in block.instructions)
        if wide and innermost is not None:
            rows |= innermost
    lanes = ("v_readlane_b32", "v_writelane_b32")
    return [i for i in kernel.instructions_of(rows) if i.opcode in lanes]


def check_calls(kernel: Kernel) -> list[str]:
    calls = [i for i in kernel.instructions() if i.opcode.startswith("s_swappc")]
    return [f"{len(calls)} calls of functions that are not inlined, the first at {calls[0]}"] if calls else []


def check_row_access(kernel: Kernel, copies: bool) -> list[str]:
    """Rows are read in pieces of 16 bytes, and written so in the same loops; a copy stores the registers it loaded.

    Other wide accesses (the stores of a report, the loads of a quantiser) do not count; nor do stores of another address
    kind than the loads, such as those of trace records (flat, while rows are global).
    """

    def wide(instruction: Instruction) -> bool:
        return instruction.opcode.endswith("_dwordx4")

    loops = kernel.loops
    reads = [(n, i) for n, block in enumerate(kernel.blocks) for i in block.instructions if i.is_load and wide(i)]
    if not reads:
        return ["no 16-byte load (global_load_dwordx4)"]
    for block, read in reads:
        for nest in [loop for loop in loops if block in loop][:2]:
            store = read.opcode.replace("load", "store")
            stored = {i.stored for i in kernel.instructions_of(nest) if i.opcode == store}
            if read.loaded in stored if copies else stored:
                return []
    return [f"no 16-byte store (global_store_dwordx4) of {'what' if copies else 'rows where'} 16-byte loads read"]


def check_releases(kernel: Kernel) -> list[str]:
    """Between data and a signal: buffer_wbl2 sc0 sc1, then a wait for it. The signal itself has system scope."""
    problems, signals = {}, set()

    def step(instruction: Instruction, state: str) -> str:
        if is_data_store(instruction):
            return "dirty"
        if is_system_write_back(instruction) and state == "dirty":
            return "writing back"
        if instruction.waits_for_memory and state == "writing back":
            return "clean"
        if is_signal_store(instruction):
            signals.add(instruction)
            if not instruction.is_system_scope:
                problems[instruction] = f"signal not at system scope (sc0 sc1): {instruction}"
            elif state != "clean":
                problems[instruction] = f"data may be {state} when the signal goes out: {instruction}"
        return state

    kernel.walk("clean", step)
    if not signals:
        return ["no signal store (64 bits, sc0 sc1) at all"]
    return list(problems.values())


def check_leader_signals(kernel: Kernel) -> list[str]:
    """A leader signals for its block only after a barrier that every wave reached with its stores done.

    s_barrier itself does not wait for stores, and the leader's own wait covers only its own wave. From the barrier to the
    signal the leader loads nothing: a wave that loads has moved on to its own work. (In Dispatch the senders' code
    follows the receivers', and a path leads through both that no wave takes.)
    """
    problems = {}

    def step(instruction: Instruction, state: str) -> str:
        if is_data_store(instruction):
            return "stores in flight"
        if instruction.waits_for_memory and state == "stores in flight":
            return "done"
        if instruction.opcode == "s_barrier":  # a wait after it comes too late for the other waves
            return str(instruction) if state == "stores in flight" else "done"
        if instruction.is_load and state.startswith("line"):
            return "done"
        if is_signal_store(instruction) and state.startswith("line"):
            problems[state] = f"barrier before a signal does not wait for stores (s_waitcnt vmcnt(0)): {state}"
        return state

    kernel.walk("done", step)
    return list(problems.values())


def check_acquires(kernel: Kernel) -> list[str]:
    """A spin polls at system scope; after observing its signal it loads it again and invalidates the caches.

    A spin that polls LL words may also poll a signal, to which the same applies: it is the first other 64-bit load. A wave
    that waits for the others of its block polls the LDS, which has no scopes.
    """
    problems = []
    for loop in kernel.loops_with("s_sleep"):
        instructions = list(kernel.instructions_of(loop))
        loads = [i for i in instructions if i.is_load and not finds_a_peer(i)]
        if not loads and any(i.opcode.startswith("ds_read") for i in instructions):
            continue
        poll = loads[0] if loads else None
        if short_name(kernel) in TILE_COUNTERS and [i.opcode for i in loads] == ["global_load_dword"]:
            continue
        if any(is_of_ll_word(i) for i in loads):
            poll = next((i for i in loads if i.opcode.endswith("_dwordx2") and not is_of_ll_word(i)), None)
            if poll is None:
                continue
        if poll is None or not poll.is_system_scope:
            problems.append(f"a spin polls without system scope (sc0 sc1): {poll}")
            continue
        exits = {s for index in loop for s in kernel.blocks[index].successors if s not in loop}
        places = [*loop, *_before_the_next_wait(kernel, exits - loop)]
        if not any(_acquires(kernel.blocks[index].instructions, poll.address) for index in places):
            problems.append(
                f"no acquire (load sc0 sc1, s_waitcnt vmcnt(0), buffer_inv sc0 sc1) follows the poll: {poll}"
            )
    return problems


def _before_the_next_wait(kernel: Kernel, starts: set[int]) -> set[int]:
    """The blocks that are reached before another wave is met or another spin begins."""
    reached: set[int] = set()
    ahead = list(starts)
    while ahead:
        index = ahead.pop()
        opcodes = {i.opcode for i in kernel.blocks[index].instructions}
        if index in reached or "s_sleep" in opcodes:
            continue
        reached.add(index)
        if "s_barrier" not in opcodes:
            ahead.extend(kernel.blocks[index].successors)
    return reached


def _acquires(instructions: list[Instruction], address: str) -> bool:
    """Whether they load `address` at system scope, wait for it, and then invalidate."""
    state = "before"
    for instruction in instructions:
        if instruction.is_load:
            acquiring = instruction.is_system_scope and instruction.address == address
            state = "loaded" if acquiring else "before"
        elif instruction.waits_for_memory and state == "loaded":
            state = "arrived"
        elif is_system_invalidate(instruction) and state == "arrived":
            return True
    return False


def check_products(kernel: Kernel) -> list[str]:
    """The innermost loop must multiply by MFMA."""
    opcodes = {i.opcode for i in kernel.instructions() if i.opcode.startswith("v_mfma")}
    return [] if any(kernel.loops_with(opcode) for opcode in opcodes) else ["no matrix instruction (v_mfma) in a loop"]


def check_ll_words(kernel: Kernel, has_scope_bits: bool) -> list[str]:
    """Data and stamp of an LL word travel in one access that bypasses all caches. gfx90a writes through; its loads say glc."""
    problems = []
    for instruction in filter(is_of_ll_word, kernel.instructions()):
        scope = "sc0 sc1" if has_scope_bits else "glc" if instruction.is_load else ""
        what = "polled" if instruction.is_load else "stored"
        if not instruction.opcode.endswith("_dwordx2"):
            problems.append(f"an LL word is {what} in parts: {instruction}")
        elif not set(scope.split()) <= instruction.modifiers:
            problems.append(f"an LL word is not {what} at system scope ({scope}): {instruction}")
    return problems


def check_ll_presence(kernel: Kernel) -> list[str]:
    """Without line tables no access would count as an LL word, and none would be checked."""
    problems = []
    if short_name(kernel) in LL_SENDERS and not any(i.is_store and is_of_ll_word(i) for i in kernel.instructions()):
        problems.append("no store of an LL word (comm/ll_word.h) at all")
    if short_name(kernel) in LL_RECEIVERS:
        spins = set().union(*kernel.loops_with("s_sleep"))
        if not any(i.is_load and is_of_ll_word(i) for i in kernel.instructions_of(spins)):
            problems.append("no spin that polls an LL word (comm/ll_word.h)")
    return problems


def check_kernel(kernel: Kernel, has_scope_bits: bool) -> list[str]:
    name = short_name(kernel)
    problems = []
    if name in HOT | MULTIPLIERS:
        problems += check_resources(kernel) + check_calls(kernel)
    if name in MULTIPLIERS:
        problems += check_products(kernel)
    if name in ROW_COPIERS | ROW_ADDERS:
        problems += check_row_access(kernel, copies=name in ROW_COPIERS)
    problems += check_ll_words(kernel, has_scope_bits) + check_ll_presence(kernel)
    if has_scope_bits:
        without_acquire = check_acquires(kernel)
        problems += without_acquire if len(without_acquire) != BARE_SPINS.get(name, 0) else []
        if name in SIGNALLERS:
            problems += check_releases(kernel) + check_leader_signals(kernel)
    return problems


def describe(kernel: Kernel) -> str:
    used = ", ".join(f"{value} {name}" for name, value in kernel.resources.items())
    words = ("_dwordx4", "buffer_wbl2", "buffer_inv", "s_barrier", "v_mfma")
    count = Counter(
        ("LL " if is_of_ll_word(i) else "") + i.opcode + (" sc0 sc1" if i.is_system_scope else "")
        for i in kernel.instructions()
        if is_of_ll_word(i) or (any(word in i.opcode for word in words) and not i.opcode.startswith("s_load"))
    )
    return f"{short_name(kernel)}: {used}\n    " + ", ".join(f"{n} x {op}" for op, n in sorted(count.items()))


def check(text: str, expected: set[str] = HOT) -> tuple[list[str], list[str]]:
    """Returns notes about each kernel, and violations. `expected`: kernels that must be present."""
    has_scope_bits = architecture(text) in ("gfx942", "gfx950")
    found = kernels(text)
    problems = [f"no kernel {name}" for name in sorted(expected - {short_name(kernel) for kernel in found})]
    for kernel in found:
        problems += [f"{short_name(kernel)}: {problem}" for problem in check_kernel(kernel, has_scope_bits)]
    return [describe(kernel) for kernel in found], problems


def report_on(path: str) -> tuple[str, bool]:
    """Notes about a listing, and whether it obeys all rules."""
    text = Path(path).read_text()
    report, problems = check(text, FAMILIES.get(Path(path).name.split(".")[0], set()))
    lines = [f"ISA of {architecture(text)} ({path})", *("  " + line for line in report)]
    lines += [f"  WRONG {problem}" for problem in problems]
    lines.append("  all rules kept" if not problems else f"  {len(problems)} rules broken")
    return "\n".join(lines), not problems


def main(paths: list[str]) -> int:
    with ProcessPoolExecutor() as pool:
        reports = list(pool.map(report_on, paths))
    print("\n".join(text for text, _ in reports))
    return 0 if reports and all(kept for _, kept in reports) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
