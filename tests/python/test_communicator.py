"""Several clients on one Communicator: made, used together and closed in any order; clear errors for what they cannot do."""

import random
from collections.abc import Callable

import line_codecs
import pytest
import torch
from collective_calls import Calls, values
from ranks import run_processes, run_threads

import moe_a2a

pytestmark = pytest.mark.cpu


def check_sum(coll: moe_a2a.Collectives, call: int, count: int, dtype: torch.dtype, in_place: bool) -> None:
    x = values(coll.rank, call, count, dtype)
    out = coll.all_reduce(x, out=x if in_place else None)
    expected = sum(values(r, call, count, torch.float32) for r in range(coll.num_ranks)).to(dtype)
    assert torch.equal(out, expected)
    assert (out.data_ptr() == x.data_ptr()) == (in_place or count == 0)


def make_ep(group, hidden: int = 16, **kwargs) -> moe_a2a.ExpertParallel:
    return moe_a2a.ExpertParallel(
        group, num_experts=12, num_topk=2, hidden=hidden, num_max_tokens_per_rank=32, dtype=torch.float32, **kwargs
    )


def check_layer(ep: moe_a2a.ExpertParallel, seed: int, between: Callable[[], None] = lambda: None) -> None:
    generator = torch.Generator().manual_seed(seed * 10 + ep.rank)
    x = torch.randn(20, ep.hidden, generator=generator)
    topk_idx = torch.stack([torch.randperm(12, generator=generator)[:2] for _ in range(20)])
    h = ep.dispatch(x, topk_idx)
    between()
    y = x.new_full((h.capacity, ep.hidden), float("nan"))
    y[: h.num_routes] = h.recv_x[h.expert_row_index[: h.num_routes].long()]
    assert torch.equal(ep.combine(y, h), x + x)


def clients_program(group, seed: int) -> None:
    with moe_a2a.Communicator(group, timeout=20) as comm:
        ep = make_ep(comm)
        coll = moe_a2a.Collectives(comm)
        generator = torch.Generator().manual_seed(seed)
        for call in range(12):
            if call == 4:
                wide = make_ep(comm, hidden=40)
            if call == 8:
                ep.close()
            if call < 8:
                check_layer(ep, seed + call)
            if call >= 4:
                check_layer(wide, seed + call)
            count = int(torch.randint(0, 3000, (1,), generator=generator))
            check_sum(coll, call, count, torch.bfloat16 if call % 2 else torch.float32, in_place=call % 3 == 0)
        coll.close()
        check_layer(wide, seed)
        wide.close()
        with pytest.raises(RuntimeError, match="closed"):
            coll.all_reduce(torch.ones(1))
    assert comm.is_closed


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_clients_share_a_communicator(num_ranks, session_seed):
    run_threads(num_ranks, clients_program, session_seed)


def test_clients_share_a_communicator_of_processes(session_seed):
    run_processes(2, clients_program, session_seed)


def interleaved_program(group, seed: int, num_steps: int) -> None:
    """Random collectives, with and without codecs, between the halves of random layers, nothing else in between."""
    draw = random.Random(seed)
    with moe_a2a.Communicator(group, timeout=20) as comm:
        ep, coll = make_ep(comm), moe_a2a.Collectives(comm, 16 << 10)
        calls = Calls(coll, seed)

        def some_collectives() -> None:
            for _ in range(draw.choice([0, 1, 1, 4])):
                kind = draw.choice(["all_reduce", "reduce_scatter", "all_gather", "codec"])
                count, dtype = draw.randrange(6000), draw.choice([torch.float32, torch.float16, torch.bfloat16])
                if kind == "codec":
                    xs = [values(r, count, count, dtype) for r in range(coll.num_ranks)]
                    codec = draw.choice(["fp8", "q8", "q6", "q4"])
                    assert torch.equal(coll.all_reduce(xs[coll.rank], codec=codec), line_codecs.two_shot(xs, codec))
                else:
                    calls.one(kind, count, dtype, "sum", draw.choice(["one_shot", "two_shot"]))

        for step in range(num_steps):
            some_collectives()
            check_layer(ep, seed + step, between=some_collectives)
        coll.close()
        ep.close()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_collectives_between_the_halves_of_layers(num_ranks, session_seed):
    run_threads(num_ranks, interleaved_program, session_seed, 60)


def own_communicators(group, seed: int) -> None:
    with moe_a2a.Collectives(group, timeout=20) as coll, make_ep(group, timeout=20) as ep:
        check_sum(coll, 0, 262144, torch.float32, in_place=True)
        check_layer(ep, seed)


def test_a_client_makes_a_communicator_of_its_own(session_seed):
    run_threads(2, own_communicators, session_seed)


def other_clients_program(group) -> str:
    comm = moe_a2a.Communicator(group, timeout=10)
    with pytest.raises(
        ValueError, match="ranks disagree: rank 0 is about to make the Collectives, rank 1 to make the ExpertParallel"
    ):
        moe_a2a.Collectives(comm) if comm.rank == 0 else make_ep(comm)
    check_sum(moe_a2a.Collectives(comm), 0, 5, torch.float32, in_place=False)  # the communicator still works
    return "done"


def test_ranks_that_make_different_clients_are_told():
    assert run_threads(2, other_clients_program) == ["done", "done"]


def making_while_others_end_a_trace(group) -> None:
    with moe_a2a.Collectives(group, timeout=10) as coll:
        with pytest.raises(
            ValueError, match="ranks disagree: rank 0 is about to make the ExpertParallel, rank 1 to end the trace"
        ):
            with moe_a2a.trace(coll):
                if coll.rank == 0:
                    make_ep(coll._comm)


def test_ranks_that_meet_for_different_things_are_told():
    """They took each other's values for their own kind: "cannot unpack non-iterable NoneType object"."""
    run_threads(2, making_while_others_end_a_trace)


def carried_handles_program(group) -> None:
    comm = moe_a2a.Communicator(moe_a2a.HandleExchange(group.rank, group.num_ranks), timeout=10)
    comm.set_comm_handles(group.all_gather(comm.get_comm_handle()))
    coll = moe_a2a.Collectives(comm)
    coll.set_comm_handles(group.all_gather(coll.get_comm_handle()))
    check_sum(coll, 0, 100, torch.float32, in_place=False)
    alone = moe_a2a.Collectives(moe_a2a.HandleExchange(group.rank, group.num_ranks), timeout=10)
    alone.set_comm_handles(group.all_gather(alone.get_comm_handle()))  # includes its communicator's handle
    check_sum(alone, 1, 100, torch.float32, in_place=False)
    for one in (alone, coll, comm):
        one.close()


def test_handles_may_be_carried_by_the_caller():
    run_threads(2, carried_handles_program)


def absent_rank_program(group) -> str:
    comm = moe_a2a.Communicator(group, timeout=1.0)
    coll, ep = moe_a2a.Collectives(comm), make_ep(comm)
    if comm.rank == 1:
        group.all_gather(None)
        return ""
    with pytest.raises(moe_a2a.PeerTimeoutError) as caught:
        coll.all_reduce(torch.ones(10))
    assert (caught.value.operation, caught.value.phase, caught.value.peer) == ("one_shot_all_reduce", "call", 1)
    with pytest.raises(moe_a2a.PeerTimeoutError, match="rank 1"):  # a rank that is gone is gone for every client
        ep.dispatch(torch.ones(1, 16), torch.tensor([[0, 11]]))
    group.all_gather(None)
    return str(caught.value)


def test_an_absent_rank_is_a_timeout_for_every_client():
    said = run_threads(2, absent_rank_program)[0]
    assert "rank 0 in one_shot_all_reduce waited" in said and "for the call from rank 1" in said


def other_device_program(group) -> None:
    with pytest.raises(ValueError, match="the Communicator is on cpu"):
        moe_a2a.Collectives(moe_a2a.Communicator(group, timeout=10), device="cuda:0")


def test_a_client_is_on_the_device_of_its_communicator(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # without a GPU that is what the error would name
    run_threads(2, other_device_program)


@pytest.mark.parametrize(
    "reported", [moe_a2a.RoutingError, moe_a2a.PeerRefusedError, moe_a2a.PeerTimeoutError, moe_a2a.CallMismatchError]
)
def test_an_exception_of_a_with_block_takes_precedence(monkeypatch, reported):
    """Regression: on a GPU close() raises what kernels have reported, of which only a RoutingError gave way."""

    def close(ep):
        raise reported("by a kernel")

    monkeypatch.setattr(moe_a2a.ExpertParallel, "close", close)
    (group,) = moe_a2a.thread_group(1)
    with pytest.raises(KeyError, match="of the caller"), make_ep(group):
        raise KeyError("of the caller")
    with pytest.raises(reported, match="by a kernel"), make_ep(group):
        pass
