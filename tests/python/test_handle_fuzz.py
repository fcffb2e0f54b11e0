"""set_comm_handles() with damaged, swapped and foreign handles: an error at once, nothing half connected, then a good set works.

To compare the handles with each other is not enough: live handles of a smaller object would end in SIGSEGV, another object's
handle in a rank's own place in a timeout, and a set after a failed one would count its peers twice.

MOE_A2A_FUZZED_HANDLES=10000 for a soak; MOE_A2A_SEED repeats a run.
"""

import os
import random
import time

import on_device
import pytest
import ranks
from small_calls import CONFIG, good_call

import moe_a2a

NUM_MUTANTS = int(os.environ.get("MOE_A2A_FUZZED_HANDLES") or 600)
CHECKSUM = slice(8, 16)
NUM_RANKS = 2


def seal(handle):
    """Seals as its own object would: FNV-1a over all other bytes."""
    value = bytearray(handle)
    value[CHECKSUM] = bytes(8)
    total = 0xCBF29CE484222325
    for byte in value:
        total = (total ^ byte) * 0x100000001B3 % (1 << 64)
    value[CHECKSUM] = total.to_bytes(8, "little")
    return bytes(value)


def mutant(good, others, random):
    """A bad list of handles, and what is bad about it."""
    handles = list(good)
    place = random.randrange(len(handles))
    kind = random.choice(["flip", "cut", "extend", "noise", "swap", "repeat", "foreign", "resealed", "few", "many"])
    if kind == "flip":
        changed = bytearray(handles[place])
        for _ in range(random.choice([1, 1, 2, 16])):
            changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
        handles[place] = bytes(changed)
    elif kind == "cut":
        handles[place] = handles[place][: random.randrange(len(handles[place]))]
    elif kind == "extend":
        handles[place] += random.randbytes(random.randrange(1, 99))
    elif kind == "noise":
        handles[place] = random.randbytes(len(handles[place]))
    elif kind == "swap":
        handles.reverse()
    elif kind == "repeat":
        handles[place] = handles[1 - place]
    elif kind == "foreign":
        handles = random.choice(others)
        if random.random() < 0.5:
            handles = [*good[:place], handles[place], *good[place + 1 :]]
    elif kind == "few":
        handles = handles[: random.randrange(len(handles))]
    elif kind == "many":
        handles = handles + handles[:1]
    else:
        changed = bytearray(handles[place])
        changed[random.randrange(16, len(changed))] ^= 1 << random.randrange(8)
        handles[place] = seal(bytes(changed))
    return kind, handles


def alone(group, **config):
    """timeout: how long to wait for a rank of another pid namespace, which some mutants claim to be."""
    exchange = moe_a2a.HandleExchange(group.rank, group.num_ranks)
    return moe_a2a.ExpertParallel(exchange, **{**CONFIG, "timeout": 0.02, **config})


def objects(group, **config):
    ep = alone(group, **config)
    return ep, group.all_gather(ep.get_comm_handle())


def fuzz(group, seed):
    group = moe_a2a.as_group(group)
    generator = random.Random(seed + group.rank)
    ep, good = objects(group)
    smaller, of_smaller = objects(group, num_max_tokens_per_rank=1)
    larger, of_larger = objects(group, hidden=64)
    said = {}
    for _ in range(NUM_MUTANTS):
        kind, handles = mutant(good, [of_smaller, of_larger], generator)
        if handles == good:
            continue
        try:
            ep.set_comm_handles(handles)
        except (ValueError, RuntimeError) as error:
            said.setdefault((kind, type(error).__name__), str(error))
            assert kind == "resealed" or isinstance(error, ValueError), (kind, error)
            assert "handle" in str(error) or "rank" in str(error), (kind, error)
        else:  # fields that the CPU does not read: another process's mapping address, a device number
            assert kind == "resealed"
            ep.close()
            ep = alone(group)
            good = [ep.get_comm_handle() if rank == ep.rank else handle for rank, handle in enumerate(good)]
    group.all_gather(None)
    for unused in (ep, smaller, larger):
        unused.close()
    fresh, handles = objects(group, timeout=10)
    bad = [handles[0], handles[1][:-1] + b"!"]
    for _ in range(3):
        with pytest.raises(ValueError, match="handle"):
            fresh.set_comm_handles(bad)
    fresh.set_comm_handles(handles)
    good_call(fresh)
    group.all_gather(None)
    fresh.close()
    return said


@on_device.cpu_only
def test_mutated_handles_are_refused(session_seed):
    print(f"seed {session_seed}, {NUM_MUTANTS} mutants per rank")
    for said in ranks.run_processes(NUM_RANKS, fuzz, session_seed, timeout=60 + NUM_MUTANTS / 50):
        for (kind, name), text in sorted(said.items()):
            print(f"{kind}: {name}: {text}")


def set_a_smaller_object(group):
    group = moe_a2a.as_group(group)
    ep, good = objects(group, timeout=10)
    smaller, foreign = objects(group, num_max_tokens_per_rank=1)
    with pytest.raises(
        ValueError, match=rf"place {group.rank}, of rank {group.rank} itself.*num_max_tokens_per_rank=1"
    ):
        ep.set_comm_handles(foreign)
    twin, of_twin = objects(group)
    mixed = list(good)
    mixed[group.rank] = of_twin[group.rank]
    with pytest.raises(ValueError, match="another object's"):
        ep.set_comm_handles(mixed)
    ep.set_comm_handles(good)
    good_call(ep)
    group.all_gather(None)
    for one in (ep, smaller, twin):
        one.close()


@on_device.cpu_only
def test_live_handles_of_another_object_are_refused():
    ranks.run_processes(2, set_a_smaller_object)


def set_a_twin_at_a_peer_s_place(group, all_ranks_err):
    """Equal in every field, so only the ranks together can detect it: rank 0 takes a twin for rank 1's object."""
    group = moe_a2a.as_group(group)
    ep, good = objects(group, timeout=1)
    twin, of_twin = objects(group, timeout=1)
    mixed = [good[0], of_twin[1]] if group.rank == 0 else [of_twin[0], good[1]] if all_ranks_err else good
    start = time.monotonic()
    with pytest.raises((moe_a2a.PeerTimeoutError, ValueError), match=rf"rank {1 - group.rank}.*same objects") as raised:
        ep.set_comm_handles(mixed)
    assert time.monotonic() - start < 1 + ranks.slack(1)
    said = type(raised.value).__name__
    with pytest.raises(RuntimeError, match="no peers yet"):
        good_call(ep)
    group.all_gather(None)
    ep.set_comm_handles(good)
    good_call(ep)
    group.all_gather(None)
    for one in (ep, twin):
        one.close()
    return said


@on_device.cpu_only
@pytest.mark.parametrize(
    "all_ranks_err, said",
    [(False, ["ValueError", "PeerTimeoutError"]), (True, ["PeerTimeoutError", "PeerTimeoutError"])],
    ids=["one rank", "all ranks"],
)
def test_a_twin_at_a_peer_s_place_is_refused(all_ranks_err, said):
    assert ranks.run_processes(2, set_a_twin_at_a_peer_s_place, all_ranks_err) == said


def set_again_after_a_peer_was_gone(group):
    """A set that fails when some peers are already mapped: nothing stays mapped, and the next one starts afresh."""
    group = moe_a2a.as_group(group)
    ep, good = objects(group, timeout=10)
    gone, of_gone = objects(group)
    if group.rank == 2:
        gone.close()
        gone = None
    group.all_gather(None)
    assert good[2] != of_gone[2]
    if group.rank != 2:
        with pytest.raises(RuntimeError, match=rf"rank {group.rank} cannot map the memory of rank 2.*closed"):
            gone.set_comm_handles(of_gone)
    group.all_gather(None)
    ep.set_comm_handles(good)
    with pytest.raises(RuntimeError, match="already set"):
        ep.set_comm_handles(good)
    good_call(ep)
    group.all_gather(None)
    ep.close()


@on_device.cpu_only
def test_a_set_that_fails_leaves_nothing_behind():
    ranks.run_processes(3, set_again_after_a_peer_was_gone)
