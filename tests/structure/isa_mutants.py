"""The negative control of check_isa.py on the real kernels: isa_mutants.py <build>/isa/command.txt

Loses one ordering at a time in a copy of csrc/, compiles it for gfx942, and expects the check to see it.
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
    said: str  # what the check must say
    family: str = "moe/dispatch/dispatch_kernels.cpp"  # where it shows


MUTANTS = [
    Mutant(
        "signals without their release",
        "arch/hip.h",
        r'__builtin_amdgcn_fence\(__ATOMIC_RELEASE, ""\);',
        "",
        "data may be dirty",
    ),
    Mutant(
        "signals of device scope",
        "comm/signal.h",
        r"(atomic_store<kSignalOrder, Scope::)kSystem",
        r"\1kDevice",
        "signal not at system scope",
    ),
    Mutant(
        "waits without their acquire",
        "comm/wait.h",
        r"atomic_load<kThen(, Scope::kSystem>\(&signal->word)",
        r"atomic_load<Order::kRelaxed\1",
        "no acquire",
    ),
    Mutant(
        "polls of device scope",
        "comm/wait.h",
        r"(atomic_load<kPoll, Scope::)kSystem(>\(&signal->word)",
        r"\1kDevice\2",
        "polls without system scope",
    ),
    Mutant(
        "a leader ahead of its block's stores",
        "arch/simt.h",
        r"drain_stores\(\);(\s+block_sync)",
        r"\1",
        "barrier before a signal",
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
    Mutant(
        "rows in small pieces",
        "arch/simt.h",
        r"misalignment % 16 == 0",
        "false",
        "of what 16-byte loads read",
    ),
    Mutant(
        "products without matrix units",
        "arch/hip_warp_matrix.h",
        r"value = __builtin_amdgcn_mfma_[^;]*;",
        "value[0] += to_float(a[offset + k]) * to_float(b[offset + k]);",
        "no matrix instruction",
        family="moe/experts/grouped_gemm_kernels.cpp",
    ),
    Mutant(
        "registers saved for blocks that never run",
        "arch/simt_launch.h",
        r"__launch_bounds__\(kBlockThreads, 1\)",
        "__launch_bounds__(kBlockThreads, 8)",
        "registers do not suffice",
        family="moe/experts/grouped_gemm_kernels.cpp",
    ),
]


def problems(csrc: Path, family: str, command: list[str]) -> list[str]:
    here = [word.replace(str(ROOT / "csrc"), str(csrc)) for word in command]
    here += ["--offload-arch=gfx942", "--offload-device-only", "-S", "-o", "-", str(csrc / family)]
    listing = subprocess.run(here, check=True, stdout=subprocess.PIPE, text=True, timeout=300).stdout
    return check(listing, FAMILIES[Path(family).stem])[1]


def verdict(mutant: Mutant, command: list[str]) -> str:
    """Whether the check sees the mutant. The kernels as they are keep all rules: check_isa.py has run before."""
    with tempfile.TemporaryDirectory() as folder:
        csrc = Path(shutil.copytree(ROOT / "csrc", Path(folder) / "csrc"))
        path = csrc / mutant.file
        text, count = re.subn(mutant.old, mutant.new, path.read_text())
        if count == 0:
            return f"MISSED: {mutant.file} no longer says {mutant.old}"
        path.write_text(text)
        found = problems(csrc, mutant.family, command)
    return "caught" if any(mutant.said in problem for problem in found) else "MISSED"


def main(command_file: str) -> int:
    command = Path(command_file).read_text().splitlines()
    with ThreadPoolExecutor(2) as pool:
        verdicts = list(pool.map(lambda mutant: verdict(mutant, command), MUTANTS))
    for mutant, said in zip(MUTANTS, verdicts, strict=True):
        print(f"  {mutant.name}: {said}")
    return 0 if set(verdicts) == {"caught"} else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
