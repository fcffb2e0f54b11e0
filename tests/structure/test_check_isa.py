"""Each rule of check_isa.py on small listings: a kernel that keeps it, and one edit that breaks it."""

import pytest
from amd_assembly import kernels
from check_isa import check, check_kernel

# Every wave copies 16 bytes per lane, the block meets, the leader raises a signal.
SEND = """
.LBB0_1:
	global_load_dwordx4 v[6:9], v[4:5], off
	s_waitcnt vmcnt(0)
	global_store_dwordx4 v[10:11], v[6:9], off
	s_cbranch_scc0 .LBB0_1
	s_waitcnt vmcnt(0)
	s_barrier
	s_and_saveexec_b64 s[0:1], vcc
	s_cbranch_execz .LBB0_3
	buffer_wbl2 sc0 sc1
	s_waitcnt vmcnt(0)
.LBB0_2:
	global_store_dwordx2 v0, v[2:3], s[4:5] sc0 sc1
	s_cbranch_scc0 .LBB0_2
.LBB0_3:
	s_endpgm
"""

# A wave spins, acquires, and reads the row that has landed.
RECEIVE = """
	v_mov_b32_e32 v0, 0
.LBB0_1:
	global_load_dwordx2 v[4:5], v[2:3], off sc0 sc1
	s_waitcnt vmcnt(0)
	s_cbranch_vccnz .LBB0_2
	s_sleep 1
	s_branch .LBB0_1
.LBB0_2:
	global_load_dwordx2 v[4:5], v[2:3], off sc0 sc1
	s_waitcnt vmcnt(0)
	buffer_inv sc0 sc1
.LBB0_3:
	global_load_dwordx4 v[6:9], v[10:11], off
	s_waitcnt vmcnt(0)
	global_store_dwordx4 v[12:13], v[6:9], off
	s_cbranch_scc0 .LBB0_3
	s_endpgm
"""

RESOURCES = {
    "agpr_count": 0,
    "group_segment_fixed_size": 304,
    "private_segment_fixed_size": 0,
    "sgpr_count": 40,
    "sgpr_spill_count": 0,
    "vgpr_count": 60,
    "vgpr_spill_count": 0,
}


def symbol(name: str) -> str:
    return f"_ZN7moe_a2a3hip12kernel_entryINS0_{len(name)}{name}EEEvNT_4ArgsE"


def listing(*bodies: tuple[str, str], arch: str = "gfx942", **resources: int) -> str:
    """Assembly as clang writes it, of kernels given as (name, instructions)."""
    text = [f'\t.amdgcn_target "amdgcn-amd-amdhsa--{arch}"']
    for n, (name, body) in enumerate(bodies):
        body = body.replace("LBB0", f"LBB{n}")
        text += [f"{symbol(name)}:", body, f"\t.amdhsa_kernel {symbol(name)}", f".Lfunc_end{n}:"]
    text += ["\t.amdgpu_metadata", "---", "amdhsa.kernels:"]
    for name, _ in bodies:
        fields = [f".{key}: {value}" for key, value in (RESOURCES | resources).items()]
        text += ["  - .args:", "      - .offset: 0", f"    .name:           {symbol(name)}"]
        text += [f"    {field}" for field in fields]
    return "\n".join([*text, "amdhsa.target: amdgcn-amd-amdhsa--" + arch, "\t.end_amdgpu_metadata", ""])


def problems(name: str, body: str, **resources: int) -> list[str]:
    (kernel,) = kernels(listing((f"{name}", body), **resources))
    return check_kernel(kernel, has_scope_bits=True)


def edited(body: str, old: str, new: str) -> str:
    assert old in body
    return body.replace(old, new)


def test_good_kernels_pass():
    assert problems("DispatchSend", SEND) == []
    assert problems("CombineRecv", RECEIVE) == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("\tbuffer_wbl2 sc0 sc1\n", "", "data may be dirty"),
        ("buffer_wbl2 sc0 sc1", "buffer_wbl2 sc1", "data may be dirty"),
        (
            "buffer_wbl2 sc0 sc1\n\ts_waitcnt vmcnt(0)",
            "buffer_wbl2 sc0 sc1",
            "data may be writing back",
        ),
        (
            "buffer_wbl2 sc0 sc1\n\ts_waitcnt vmcnt(0)",
            "buffer_wbl2 sc0 sc1\n\ts_waitcnt vmcnt(1)",
            "writing back",
        ),
        (".LBB0_2:\n", ".LBB0_2:\n\tglobal_store_dword v0, v1, s[8:9]\n", "data may be dirty"),
        ("s[4:5] sc0 sc1", "s[4:5] sc1", "signal not at system scope"),
        ("s[4:5] sc0 sc1", "s[4:5]", "no signal store"),
        ("\ts_waitcnt vmcnt(0)\n\ts_barrier", "\ts_barrier", "barrier before a signal"),
        (
            "\ts_waitcnt vmcnt(0)\n\ts_barrier",
            "\ts_waitcnt lgkmcnt(0)\n\ts_barrier",
            "barrier before a signal",
        ),
        ("global_load_dwordx4", "global_load_dword", "no 16-byte load"),
        ("global_store_dwordx4", "global_store_dword", "no 16-byte store"),
        (
            "global_store_dwordx4 v[10:11], v[6:9]",
            "global_store_dwordx4 v[10:11], v[20:23]",
            "of what 16-byte loads read",
        ),
        ("\ts_endpgm", "\ts_swappc_b64 s[30:31], s[0:1]\n\ts_endpgm", "1 calls of functions"),
        ("\ts_endpgm", "\tscratch_load_dword v1, off, s32\n\ts_endpgm", "registers do not suffice"),
    ],
)
def test_a_broken_sender_is_found(old, new, said):
    found = problems("DispatchSend", edited(SEND, old, new))
    assert len(found) == 1 and said in found[0]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            ".LBB0_1:\n\tglobal_load_dwordx2 v[4:5], v[2:3], off sc0 sc1",
            ".LBB0_1:\n\tglobal_load_dwordx2 v[4:5], v[2:3], off sc1",
            "polls without system scope",
        ),
        ("\tbuffer_inv sc0 sc1\n", "", "no acquire"),
        ("buffer_inv sc0 sc1", "buffer_inv sc1", "no acquire"),
        ("\ts_waitcnt vmcnt(0)\n\tbuffer_inv", "\tbuffer_inv", "no acquire"),
        (
            ".LBB0_2:\n\tglobal_load_dwordx2 v[4:5], v[2:3]",
            ".LBB0_2:\n\tglobal_load_dwordx2 v[4:5], v[20:21]",
            "no acquire",
        ),
        (".LBB0_2:\n", ".LBB0_2:\n\ts_barrier\n\ts_branch .LBB0_3\n", "no acquire"),
    ],
)
def test_a_broken_receiver_is_found(old, new, said):
    found = problems("CombineRecv", edited(RECEIVE, old, new))
    assert len(found) == 1 and said in found[0]


def test_an_acquire_of_another_wait_does_not_count():
    lost = edited(RECEIVE, "\tbuffer_inv sc0 sc1\n", "").replace("\ts_endpgm", "")
    second = RECEIVE.replace("LBB0_", "LBB0_9").replace("v[2:3]", "v[22:23]")
    assert len(problems("CombineRecv", lost + second)) == 1


@pytest.mark.parametrize("resource", ["vgpr_spill_count", "private_segment_fixed_size"])
def test_spills_are_found(resource):
    (found,) = problems("DispatchSend", SEND, **{resource: 4})
    assert "registers do not suffice" in found


def test_a_scalar_register_parked_in_a_vector_register_costs_no_memory():
    assert problems("DispatchRecv", RECEIVE, sgpr_spill_count=4) == []


def test_it_may_not_be_parked_where_rows_pass():
    parked = "\tv_writelane_b32 v40, s9, 3\n"
    outside = edited(SEND, ".LBB0_1:\n", parked + ".LBB0_1:\n")
    inside = edited(SEND, ".LBB0_1:\n", ".LBB0_1:\n" + parked)
    assert problems("DispatchSend", outside, sgpr_spill_count=1) == []
    (found,) = problems("DispatchSend", inside, sgpr_spill_count=1)
    assert "registers do not suffice" in found and "v_writelane_b32" in found


# Report::bad_token and bad_expert, where data are not written back.
REPORT = """	global_store_dword v8, v11, s[50:51] offset:580 sc0 sc1
	global_store_dwordx2 v8, v[6:7], s[50:51] offset:584 sc0 sc1
"""


def test_two_fields_of_a_report_are_no_signal():
    place = "\ts_waitcnt vmcnt(0)\n\ts_barrier"
    assert problems("DispatchSend", edited(SEND, place, REPORT + place)) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [("s[50:51] offset:580", "s[52:53] offset:580"), ("offset:580 sc0 sc1", "offset:580"), (" offset:584", "")],
)
def test_other_pairs_of_stores_are(old, new):
    place = "\ts_waitcnt vmcnt(0)\n\ts_barrier"
    (found,) = problems("DispatchSend", edited(SEND, place, edited(REPORT, old, new) + place))
    assert "data may be dirty" in found


def test_a_wave_that_loads_after_a_barrier_speaks_for_itself():
    lost = edited(SEND, "\ts_waitcnt vmcnt(0)\n\ts_barrier", "\ts_barrier")
    (found,) = problems("DispatchSend", lost)
    assert "barrier before a signal" in found
    loads = edited(lost, "\ts_barrier\n", "\ts_barrier\n\tglobal_load_dword v1, v0, s[8:9]\n")
    assert problems("DispatchSend", loads) == []


def test_a_barrier_without_a_signal_after_it_may_leave_stores_in_flight():
    tail = "\tglobal_store_dword v0, v1, s[8:9]\n\ts_barrier\n\ts_endpgm"
    assert problems("DispatchSend", edited(SEND, "\ts_endpgm", tail)) == []


def test_row_pieces_in_generic_memory_count_as_wide():
    generic = SEND.replace("global_store_dwordx4", "flat_store_dwordx4")
    assert "no 16-byte store" in "".join(problems("DispatchSend", generic))  # a record of a trace is no row
    generic = generic.replace("global_load_dwordx4", "flat_load_dwordx4")
    assert problems("DispatchSend", generic) == []


def test_a_missing_kernel_is_found_and_resources_are_reported():
    report, found = check(listing(("DispatchSend", SEND), ("CombineRecv", RECEIVE)))
    assert found == [f"no kernel {name}" for name in ("Combine", "CombineSend", "Dispatch", "DispatchRecv")]
    assert "60 vgpr" in report[0] and "304 lds" in report[0] and "global_store_dwordx4" in report[0]


def test_an_architecture_without_scope_bits_is_checked_for_resources_only():
    body = SEND.replace(" sc0 sc1", "")
    _, found = check(listing(("DispatchSend", body), arch="gfx90a", vgpr_spill_count=3))
    assert [problem for problem in found if "no kernel" not in problem] == [
        "DispatchSend: registers do not suffice: 3 vgpr_spills"
    ]
