"""The negative control of check_isa.py on the real kernels: isa_mutants.py <build>/isa/command.txt [alone]

Drops orderings in a copy of csrc/, compiles it for gfx942 without the recorder (the listings of `make kernels` have it), and
expects the check to report each loss. Mutants of one group are compiled together, since the check reports each
differently. `alone` compiles each mutant by itself and shows that it alone causes the report: run it after changing the
mutants.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from check_isa import FAMILIES, check

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str  # a regular expression
    new: str
    said: str  # what the check must report


# For each group, the family in which its mutants show.
GROUPS: list[tuple[str, list[Mutant]]] = [
    (
        "moe/dispatch/dispatch_kernels.cpp",
        [
            Mutant(
                "signals without their release",
                "arch/hip.h",
                r'__builtin_amdgcn_fence\(__ATOMIC_RELEASE, ""\);',
                "",
                "data may be dirty",
            ),
            Mutant(
                "waits without their acquire",
                "comm/wait.h",
                r"atomic_load<kThen(, Scope::kSystem>\(&signal->word)",
                r"atomic_load<Order::kRelaxed\1",
                "no acquire",
            ),
            Mutant(
                "LL words stored at device scope",
                "comm/ll_word.h",
                r"(atomic_store<Order::kRelaxed, Scope::)kSystem",
                r"\1kDevice",
                "not stored at system scope",
            ),
            Mutant(
                "LL words polled at device scope",
                "comm/ll_word.h",
                r"(atomic_load<Order::kRelaxed, Scope::)kSystem",
                r"\1kDevice",
                "not polled at system scope",
            ),
            Mutant(
                "rows in small pieces",
                "arch/simt.h",
                r"misalignment % 16 == 0",
                "false",
                "of what 16-byte loads read",
            ),
        ],
    ),
    (
        "moe/dispatch/dispatch_kernels.cpp",
        [
            Mutant(
                "signals of device scope",
                "comm/signal.h",
                r"(atomic_store<kSignalOrder, Scope::)kSystem",
                r"\1kDevice",
                "signal not at system scope",
            ),
            Mutant(
                "polls of device scope",
                "comm/wait.h",
                r"(atomic_load<kPoll, Scope::)kSystem(>\(&signal->word)",
                r"\1kDevice\2",
                "polls without system scope",
            ),
            Mutant(
                "LL words stored like data",
                "comm/ll_word.h",
                r"atomic_store<Order::kRelaxed, Scope::kSystem>\(address, bits\)",
                "*address = bits",
                "not stored at system scope",
            ),
            Mutant(
                "LL words read like data",
                "comm/ll_word.h",
                r"atomic_load<Order::kRelaxed, Scope::kSystem>\(address\)",
                "*address",
                "not polled at system scope",
            ),
        ],
    ),
    (
        "moe/dispatch/dispatch_kernels.cpp",
        [
            Mutant(
                "a leader ahead of its block's stores",
                "arch/simt.h",
                r"drain_stores\(\);(\s+block_sync)",
                r"\1",
                "barrier before a signal",
            ),
            Mutant(
                "LL words stored in halves",
                "comm/ll_word.h",
                r"(atomic_store<Order::kRelaxed, Scope::kSystem>)\(address, bits\);",
                r"""
                \1(reinterpret_cast<uint32_t*>(address), static_cast<uint32_t>(bits));
                \1(reinterpret_cast<uint32_t*>(address) + 1, static_cast<uint32_t>(bits >> 32));""",
                "LL word is stored in parts",
            ),
            Mutant(
                "LL words polled in halves",
                "comm/ll_word.h",
                r"return (atomic_load<Order::kRelaxed, Scope::kSystem>)\(address\);",
                r"""
                const uint32_t* half = reinterpret_cast<const uint32_t*>(address);
                return \1(half) | uint64_t{\1(half + 1)} << 32;""",
                "LL word is polled in parts",
            ),
        ],
    ),
    (
        "moe/experts/grouped_gemm_kernels.cpp",
        [
            Mutant(
                "products without matrix units",
                "arch/hip_warp_matrix.h",
                r"value = __builtin_amdgcn_mfma_[^;]*;",
                "value[0] += to_float(a[offset + k]) * to_float(b[offset + k]);",
                "no matrix instruction",
            ),
            Mutant(
                "registers saved for blocks that never run",
                "arch/simt_launch.h",
                r"__launch_bounds__\(kBlockThreads, 1\)",
                "__launch_bounds__(kBlockThreads, 8)",
                "registers do not suffice",
            ),
        ],
    ),
]


def problems(csrc: Path, family: str, command: list[str]) -> list[str]:
    here = [word.replace(str(ROOT / "csrc"), str(csrc)) for word in command]
    here += "-DMOE_A2A_RECORDING=0 --offload-arch=gfx942 --offload-device-only -S -o -".split()
    here.append(str(csrc / family))
    listing = subprocess.run(here, check=True, stdout=subprocess.PIPE, text=True, timeout=300).stdout
    return check(listing, FAMILIES[Path(family).stem])[1]


def verdicts(family: str, mutants: list[Mutant], others: list[Mutant], command: list[str]) -> list[str]:
    """Whether the check reports each mutant, and none of `others`, which are absent.

    The unmodified kernels obey all rules: check_isa.py has run before.
    """
    with tempfile.TemporaryDirectory() as folder:
        csrc = Path(shutil.copytree(ROOT / "csrc", Path(folder) / "csrc"))
        for mutant in mutants:
            path = csrc / mutant.file
            text, count = re.subn(mutant.old, mutant.new, path.read_text())
            if count == 0:
                return [f"MISSED: {mutant.file} no longer says {mutant.old}"] * len(mutants)
            path.write_text(text)
        found = problems(csrc, family, command)
    seen_too = [other.name for other in others if any(other.said in problem for problem in found)]
    if seen_too:
        return [f"MISSED: looks like {', '.join(seen_too)}"] * len(mutants)
    return ["caught" if any(mutant.said in problem for problem in found) else "MISSED" for mutant in mutants]


def main(command_file: str, alone: bool) -> int:
    command = Path(command_file).read_text().splitlines()
    work = [(family, group, []) for family, group in GROUPS]
    if alone:
        work = [(f, [mutant], [m for m in group if m is not mutant]) for f, group in GROUPS for mutant in group]
    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(lambda job: verdicts(*job, command), work))
    for (_, mutants, _), of_job in zip(work, said, strict=True):
        for mutant, verdict in zip(mutants, of_job, strict=True):
            print(f"  {mutant.name}: {verdict}")
    return 0 if {verdict for of_job in said for verdict in of_job} == {"caught"} else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], alone="alone" in sys.argv[2:]))
