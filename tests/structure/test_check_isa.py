"""Each rule of check_isa.py on small listings: a kernel that obeys it, and one edit that breaks it."""

import pytest
from amd_assembly import kernels
from check_isa import check, check_kernel

# How clang marks code from an LL word's accesses, from a signal's, and code that it has moved.
LL_STORE = "\t.loc\t2 97 3 ; csrc/arch/hip.h:97:3 @[ csrc/comm/ll_word.h:41:3 @[ csrc/rows/ll_row.h:88:47 ] ]"
LL_LOAD = "\t.loc\t2 93 10 ; csrc/arch/hip.h:93:10 @[ csrc/comm/ll_word.h:38:10 @[ csrc/rows/ll_sum.h:63:24 ] ]"
OF_A_SIGNAL = "\t.loc\t2 97 3 ; csrc/arch/hip.h:97:3 @[ csrc/comm/signal.h:70:7 @[ csrc/moe/notices.h:50:5 ] ]"
OF_A_CALLER = "\t.loc\t2 97 3 ; csrc/arch/hip.h:97:3 @[ csrc/comm/signal.h:70:7 @[ csrc/comm/ll_word.h:41:3 ] ]"
OF_NO_LINE = "\t.loc\t2 0 3 ; csrc/arch/hip.h:0:3"

# Every wave sends LL words and copies 16 bytes per lane, the block meets, the leader raises a signal.
SEND = f"""
	global_store_dword v40, v41, s[20:21]
{LL_STORE}
	global_store_dwordx2 v[42:43], v[44:45], off offset:512 sc0 sc1
{OF_NO_LINE}
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

# A wave spins on LL words; it spins on a signal, acquires, and reads the landed row.
RECEIVE = f"""
.LBB0_4:
{LL_LOAD}
	global_load_dwordx2 v[44:45], v[42:43], off offset:16 sc0 sc1
.Ltmp7:
{OF_NO_LINE}
	s_waitcnt vmcnt(0)
	s_cbranch_vccnz .LBB0_5
	s_sleep 1
	s_branch .LBB0_4
.LBB0_5:
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

# Another of each: a store after data without write-back, and a spin.
SEND_LL = f"""	global_store_dword v40, v41, s[20:21]
{LL_STORE}
	global_store_dwordx2 v[42:43], v[44:45], off sc0 sc1
"""
RECEIVE_LL_POLL = f"""{LL_LOAD}
	global_load_dwordx2 v[44:45], v[42:43], off sc0 sc1"""
RECEIVE_LL = f"""
.LBB0_6:
{RECEIVE_LL_POLL}
	s_waitcnt vmcnt(0)
	s_cbranch_vccnz .LBB0_7
	s_sleep 1
	s_branch .LBB0_6
.LBB0_7:
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
    """Assembly in clang's form, for kernels given as (name, instructions)."""
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


@pytest.mark.parametrize("line", [OF_A_SIGNAL, OF_A_CALLER, OF_NO_LINE])
def test_what_is_not_known_to_be_an_ll_word_is_a_signal(line):
    stored = edited(SEND, "\ts_endpgm\n", f"{SEND_LL}\ts_endpgm\n")
    assert problems("DispatchSend", stored) == []
    (found,) = problems("DispatchSend", edited(stored, SEND_LL, SEND_LL.replace(LL_STORE, line)))
    assert "data may be dirty" in found
    polled = edited(RECEIVE, "\ts_endpgm\n", f"{RECEIVE_LL}\ts_endpgm\n")
    assert problems("CombineRecv", polled) == []
    (found,) = problems("CombineRecv", edited(polled, RECEIVE_LL, RECEIVE_LL.replace(LL_LOAD, line)))
    assert "no acquire" in found


@pytest.mark.parametrize(
    ("name", "body", "old", "new", "said"),
    [
        ("DispatchSend", SEND, "off offset:512 sc0 sc1", "off offset:512 sc1", "not stored at system scope"),
        ("DispatchSend", SEND, "off offset:512 sc0 sc1", "off offset:512", "not stored at system scope"),
        (
            "DispatchSend",
            SEND,
            "global_store_dwordx2 v[42:43], v[44:45], off offset:512 sc0 sc1",
            "global_store_dword v[42:43], v44, off offset:512 sc0 sc1",
            "stored in parts",
        ),
        ("DispatchSend", SEND, LL_STORE, OF_A_SIGNAL, "no store of an LL word"),
        ("CombineRecv", RECEIVE, "off offset:16 sc0 sc1", "off offset:16 sc1", "not polled at system scope"),
        ("CombineRecv", RECEIVE, "off offset:16 sc0 sc1", "off offset:16", "not polled at system scope"),
        (
            "CombineRecv",
            RECEIVE,
            "global_load_dwordx2 v[44:45], v[42:43], off offset:16 sc0 sc1",
            "global_load_dword v45, v[42:43], off offset:20 sc0 sc1",
            "polled in parts",
        ),
        ("CombineRecv", RECEIVE, LL_LOAD, OF_A_SIGNAL, "no spin that polls an LL word"),
    ],
)
def test_a_broken_ll_word_is_found(name, body, old, new, said):
    assert said in "".join(problems(name, edited(body, old, new)))


def test_a_spin_for_an_ll_word_or_a_signal_acquires_the_signal():
    poll = "\tglobal_load_dwordx2 v[4:5], v[2:3], off sc0 sc1"
    either = edited(RECEIVE, ".LBB0_1:\n", f".LBB0_1:\n{RECEIVE_LL_POLL}\n{OF_A_SIGNAL}\n")
    assert problems("CombineRecv", either) == []
    (found,) = problems("CombineRecv", edited(either, "\tbuffer_inv sc0 sc1\n", ""))
    assert "no acquire" in found
    (found,) = problems("CombineRecv", either.replace(poll, poll.replace("sc0 sc1", "sc1"), 1))
    assert "polls without system scope" in found


# The first wave of a block waits for the others.
WAIT_FOR_BLOCK = """
.LBB0_8:
	ds_read_b32 v2, v1 offset:256
	s_waitcnt lgkmcnt(0)
	s_cbranch_vccnz .LBB0_9
	s_sleep 1
	s_branch .LBB0_8
.LBB0_9:
"""


def test_a_wave_may_wait_for_its_block_in_the_lds():
    end = "\ts_endpgm\n"
    assert problems("CombineRecv", edited(RECEIVE, end, WAIT_FOR_BLOCK + end)) == []
    nothing = edited(WAIT_FOR_BLOCK, "\tds_read_b32 v2, v1 offset:256\n", "")
    (found,) = problems("CombineRecv", edited(RECEIVE, end, nothing + end))
    assert "polls without system scope" in found
    (found,) = problems(
        "CombineRecv", edited(RECEIVE, end, edited(WAIT_FOR_BLOCK, "ds_read_b32", "flat_load_dword") + end)
    )
    assert "polls without system scope" in found


def test_gfx90a_polls_ll_words_past_its_first_cache():
    body = RECEIVE.replace(" sc0 sc1", " glc")
    _, found = check(listing(("CombineRecv", body), arch="gfx90a"))
    assert not [problem for problem in found if "no kernel" not in problem]
    _, found = check(listing(("CombineRecv", edited(body, "offset:16 glc", "offset:16")), arch="gfx90a"))
    assert "not polled at system scope (glc)" in "".join(found)


# An if and its else, one after the other; a flag says that the first has run.
EITHER = """
	s_cbranch_scc1 .LBB0_11
	global_store_dword v0, v1, s[8:9]
	s_barrier
	s_mov_b64 s[12:13], 0
	s_branch .LBB0_12
.LBB0_11:
	s_mov_b64 s[12:13], -1
.LBB0_12:
	s_and_b64 vcc, exec, s[12:13]
	s_cbranch_vccz .LBB0_13
	buffer_wbl2 sc0 sc1
	s_waitcnt vmcnt(0)
	global_store_dwordx2 v0, v[2:3], s[4:5] sc0 sc1
.LBB0_13:
	s_endpgm
"""


def test_no_path_leads_through_an_if_and_its_else():
    both = edited(SEND, "\ts_endpgm\n", EITHER)
    assert problems("DispatchSend", both) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("\ts_mov_b64 s[12:13], 0\n", "\ts_mov_b64 s[12:13], -1\n"),
        ("\ts_mov_b64 s[12:13], 0\n", ""),
        ("\ts_mov_b64 s[12:13], 0\n", "\ts_mov_b64 s[12:13], 0\n\tv_readlane_b32 s13, v40, 2\n"),
        ("\ts_mov_b64 s[12:13], 0\n", "\ts_mov_b64 s[12:13], 0\n\ts_load_dwordx4 s[12:15], s[0:1], 0x4\n"),
        ("s_and_b64 vcc, exec, s[12:13]\n", "s_and_b64 vcc, exec, s[12:13]\n\tv_cmp_eq_u32_e32 vcc, 0, v1\n"),
        ("s_cbranch_vccz", "s_cbranch_vccnz"),
    ],
)
def test_one_does_where_the_flag_is_not_known(old, new):
    both = edited(SEND, "\ts_endpgm\n", edited(EITHER, old, new))
    assert "barrier before a signal" in "".join(problems("DispatchSend", both))


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


def test_any_64_bit_store_of_system_scope_is_a_signal():
    place = "\ts_waitcnt vmcnt(0)\n\ts_barrier"
    stores = """	global_store_dword v8, v11, s[50:51] offset:580 sc0 sc1
	global_store_dwordx2 v8, v[6:7], s[50:51] offset:584 sc0 sc1
"""
    (found,) = problems("DispatchSend", edited(SEND, place, stores + place))
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
    assert "no 16-byte store" in "".join(problems("DispatchSend", generic))  # a trace record is not a row
    generic = generic.replace("global_load_dwordx4", "flat_load_dwordx4")
    assert problems("DispatchSend", generic) == []


def test_a_missing_kernel_is_found_and_resources_are_reported():
    report, found = check(listing(("DispatchSend", SEND), ("CombineRecv", RECEIVE)))
    assert found == [f"no kernel {name}" for name in ("Combine", "CombineSend", "Dispatch", "DispatchRecv")]
    assert "60 vgpr" in report[0] and "304 lds" in report[0] and "global_store_dwordx4" in report[0]


def test_an_architecture_without_scope_bits_is_not_checked_for_orderings():
    body = SEND.replace(" sc0 sc1", "")
    _, found = check(listing(("DispatchSend", body), arch="gfx90a", vgpr_spill_count=3))
    assert [problem for problem in found if "no kernel" not in problem] == [
        "DispatchSend: registers do not suffice: 3 vgpr_spills"
    ]
