"""Streams, residency and lifetime on GPUs: calls of one object are ordered whatever the caller's stream, two objects on two
streams do not starve each other in any order, and ending one object does not disturb others.

Seen on 4 H200 before Client::launch() ordered streams: one object called on three streams in turn, and two objects launched
in opposite order on the ranks, ended in PeerTimeoutError on all ranks.
"""

import contextlib

import on_device
import pytest
import torch

import moe_a2a

pytestmark = [on_device.TESTS, on_device.gpu_only]

CONFIG = {
    "num_topk": 4, "hidden": 2048, "num_max_tokens_per_rank": 1024, "dtype": torch.bfloat16, "timeout": 10,
}  # fmt: skip


def make_ep(group, **config):
    return moe_a2a.ExpertParallel(group, **{**CONFIG, "num_experts": 6 * group.num_ranks, **config})


def sums(coll, call, count, wrong):
    """An all-reduce of small integers, checked on the device."""
    x = ((torch.arange(count, device=coll.device) * 7 + coll.rank * 5 + call) % 31 - 15).float()
    expected = sum(
        ((torch.arange(count, device=coll.device) * 7 + r * 5 + call) % 31 - 15).float() for r in range(coll.num_ranks)
    )
    wrong += (coll.all_reduce(x) != expected).sum()


def collectives_program(group):
    with moe_a2a.Communicator(group, timeout=10) as comm, moe_a2a.Collectives(comm) as coll:
        wrong = torch.zeros((), dtype=torch.int64, device=coll.device)
        for call in range(300):
            sums(coll, call, [1, 1000, 40_000, 262_144][call % 4], wrong)
        coll.check()
        assert wrong.item() == 0
        graph, static = torch.cuda.CUDAGraph(), torch.zeros(5000, device=coll.device, dtype=torch.bfloat16)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            coll.all_reduce(static)
        side.synchronize()
        with torch.cuda.graph(graph):
            out = coll.all_reduce(static)
        for replay in range(50):  # each takes a fresh epoch
            static.fill_(replay % 7 + coll.rank)
            graph.replay()
            wrong += (out != sum(replay % 7 + r for r in range(coll.num_ranks))).sum()
        coll.check()
        assert wrong.item() == 0


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_all_reduce_on_gpus(num_ranks):
    on_device.run(num_ranks, collectives_program)


def one_object_program(group):
    """Three streams in turn, nothing else between the calls."""
    with moe_a2a.Collectives(group, timeout=10) as coll, make_ep(group) as ep:
        streams = [torch.cuda.Stream() for _ in range(3)]
        x = torch.full((600, ep.hidden), 1.0, device=ep.device, dtype=ep.dtype)
        topk_idx = (torch.arange(600 * 4, device=ep.device).reshape(600, 4) * 5) % ep.num_experts
        torch.cuda.synchronize()
        outs = []
        for call in range(60):
            with torch.cuda.stream(streams[call % 3]):
                h = ep.dispatch(x, topk_idx)
                y = h.recv_x[h.expert_row_index.clamp(0, h.recv_x.shape[0] - 1).long()]
                outs.append(ep.combine(y, h))
                coll.all_reduce(x[0].float())
        torch.cuda.synchronize()
        ep.check()
        coll.check()
        assert all(bool((out == 4).all()) for out in outs)


def test_one_object_on_three_streams():
    on_device.run(2, one_object_program)


def two_objects_program(group):
    """Each rank launches the two objects' calls in the opposite order."""
    with make_ep(group) as first, make_ep(group) as second:
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        x = torch.full((900, first.hidden), 1.0, device=first.device, dtype=first.dtype)
        topk_idx = (torch.arange(900 * 4, device=first.device).reshape(900, 4) * 5) % first.num_experts
        torch.cuda.synchronize()
        pairs = list(zip([first, second], streams, strict=True))
        for _ in range(40):
            handles = []
            for ep, stream in pairs if group.rank % 2 else reversed(pairs):
                with torch.cuda.stream(stream):
                    handles.append((ep, stream, ep.dispatch(x, topk_idx)))
            for ep, stream, h in handles:
                with torch.cuda.stream(stream):
                    y = h.recv_x[h.expert_row_index.clamp(0, h.recv_x.shape[0] - 1).long()]
                    out = ep.combine(y, h)
            torch.cuda.synchronize()
            assert bool((out == 4).all())
        first.check()
        second.check()


def test_two_objects_on_two_streams_in_opposite_order():
    on_device.run(2, two_objects_program)


def many_objects_program(group):
    """Six objects on six streams, each with messages for its whole share; the ranks launch them in opposite orders.
    Regression: each took half of the device, so kernels that waited for each other's peers were never resident together."""
    with contextlib.ExitStack() as stack:
        colls = [stack.enter_context(moe_a2a.Collectives(group, timeout=10)) for _ in range(6)]
        streams = [torch.cuda.Stream() for _ in colls]
        x = torch.full((2 << 20,), 1.0, device=colls[0].device)
        torch.cuda.synchronize()
        for _ in range(20):
            outs = []
            pairs = list(zip(colls, streams, strict=True))
            for coll, stream in pairs if group.rank % 2 else reversed(pairs):
                with torch.cuda.stream(stream):
                    outs.append(coll.all_reduce(x, algorithm="two_shot"))
            torch.cuda.synchronize()
            assert all(bool((out == group.num_ranks).all()) for out in outs)
        for coll in colls:
            coll.check()


def test_six_objects_on_six_streams_in_opposite_order():
    on_device.run(2, many_objects_program)


def ordered_program(group):
    """Three clients of an ordered communicator on three streams, in one order on all ranks. Each may use every SM: without the
    order, blocks of one would keep those of the next from becoming resident."""
    with contextlib.ExitStack() as stack:
        with make_ep(group) as alone:
            blocks_alone = alone._core.blocks_for(900)
        comm = stack.enter_context(moe_a2a.Communicator(group, timeout=10, ordered=True))
        first, second = (stack.enter_context(make_ep(comm)) for _ in range(2))
        coll = stack.enter_context(moe_a2a.Collectives(comm))
        assert first._core.blocks_for(900) == second._core.blocks_for(900) == blocks_alone
        streams = [torch.cuda.Stream() for _ in range(3)]
        x = torch.full((900, first.hidden), 1.0, device=first.device, dtype=first.dtype)
        topk_idx = (torch.arange(900 * 4, device=first.device).reshape(900, 4) * 5) % first.num_experts
        torch.cuda.synchronize()
        wrong = torch.zeros((), dtype=torch.int64, device=first.device)
        for call in range(60):
            for ep, stream in zip((first, second), streams, strict=False):
                with torch.cuda.stream(stream):
                    h = ep.dispatch(x, topk_idx, num_blocks=1000)
                    y = h.recv_x[h.expert_row_index.clamp(0, h.recv_x.shape[0] - 1).long()]
                    wrong += (ep.combine(y, h, num_blocks=1000) != 4).sum()
            with torch.cuda.stream(streams[2]):
                sums(coll, call, [1, 40_000, 1 << 20][call % 3], wrong)
        torch.cuda.synchronize()
        for client in (first, second, coll):
            client.check()
        assert wrong.item() == 0


def test_clients_of_an_ordered_communicator():
    on_device.run(2, ordered_program)


def units_and_dies():
    """As csrc/arch/dies.h has them."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    units = properties.multi_processor_count
    if not torch.version.hip:
        return units, 1
    if properties.gcnArchName.startswith("gfx90a"):
        return units if units < 104 else units // 8 * 8 - 8, 1
    return units, next(dies for dies in (8, 6, 4, 2, 1) if units % dies == 0) if units > 40 else 1


def too_many_objects_program(group):
    """One object too many for two compute units each, or on AMD for one of each die, is refused on every rank; the others keep
    working."""
    units, dies = units_and_dies()
    most = min(units // 2, units // dies)
    with contextlib.ExitStack() as stack:
        colls = [stack.enter_context(moe_a2a.Collectives(group, max_nbytes=1 << 16)) for _ in range(most)]
        with pytest.raises(
            RuntimeError, match=rf"rank {group.rank}: {most + 1} objects would share the {units} .*at most {most} can"
        ):
            moe_a2a.Collectives(group, max_nbytes=1 << 16, timeout=10)
        assert colls[0].all_reduce(torch.ones(4, device=colls[0].device)).tolist() == [group.num_ranks] * 4
        colls[1].close()
        moe_a2a.Collectives(group, max_nbytes=1 << 16).close()


def test_more_objects_than_the_device_holds_are_refused():
    on_device.run(2, too_many_objects_program, timeout=120)


def dropped_handle_program(group):
    """A dropped handle is released on the stream of the call, not on the null stream."""
    with make_ep(group, num_buffers=1) as ep:
        x = torch.full((64, ep.hidden), 1.0, device=ep.device, dtype=ep.dtype)
        topk_idx = torch.zeros((64, 4), dtype=torch.int64, device=ep.device)
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(20):
                handle = ep.dispatch(x, topk_idx)
                del handle
        stream.synchronize()
        ep.check()


def test_dropped_handles_are_taken_back():
    on_device.run(2, dropped_handle_program)


def memory_program(group):
    """If one rank runs out of memory while an object is made, all free theirs."""
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    for _ in range(3):
        config = {"num_max_tokens_per_rank": 4096 if group.rank else 1_000_000, "num_max_ll_tokens": 0}
        with pytest.raises((RuntimeError, ValueError)):
            make_ep(group, hidden=16384, num_buffers=16, **config)
    torch.cuda.synchronize()
    assert before - torch.cuda.mem_get_info()[0] < 256 << 20


def test_a_failed_construction_gives_memory_back():
    on_device.run(2, memory_program)
