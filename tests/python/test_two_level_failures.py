"""A TwoLevelExpertParallel whose ranks pass bad arguments, make other calls than their peers, or die."""

import os
import time

import on_device
import pytest
import ranks
import torch
from node_groups import groups, run
from ranks import DIED
from two_level_batches import H, K, T, batch, scaled_rows, sizes

import moe_a2a
from moe_a2a import TwoLevelExpertParallel

pytestmark = [on_device.TESTS, on_device.cpu_only]


def arguments_program(world, num_nodes, num_local):
    node, rail = groups(num_nodes, num_local)
    rank = world.rank()
    with pytest.raises(TypeError, match=r"between is a int; pass a torch.distributed group of one rank of every node"):
        TwoLevelExpertParallel(node, 3, **sizes(world))
    for how, error in [
        ({"num_experts": 6}, "num_experts=6 is not divisible by num_ranks=4 .2 nodes of 2. on rank 1"),
        ({"hidden": 0}, r"hidden=0 is not in \[1, "),
        ({"hidden": "64"}, r"hidden='64' is a str on rank 1; pass an int"),
        ({"dtype": torch.int8}, r"dtype=torch.int8 on rank 1; pass torch.float32"),
        ({"axis": 1}, "unexpected keyword argument 'axis' on rank 1; leave it out"),
        ({"num_topk": K + 1}, "the nodes differ: num_topk on rank 1 of node 0: 4, on its peer of node 1: 3|other than"),
    ]:
        with pytest.raises(ValueError, match=error if rank == 1 else "nodes? .*differ: num_topk|a rank other than"):
            TwoLevelExpertParallel(node, rail, **sizes(world, **(how if rank == 1 else {})))
    # What only the node's ExpertParallel refuses.
    with pytest.raises((RuntimeError, ValueError, moe_a2a.PeerRefusedError), match="num_buffers|failed on its node"):
        TwoLevelExpertParallel(node, rail, **sizes(world, num_buffers=0 if rank == 1 else 2))
    # Regression: the ranks of the other node waited until their deadline.
    words = {1: "device='nonsense' is not a device on rank 1", 0: "^rank 1 could not make its Communicator: "}
    with pytest.raises((RuntimeError, ValueError), match=words.get(rank, "the call of rank . failed on its node, 0")):
        TwoLevelExpertParallel(node, rail, **sizes(world, **({"device": "nonsense"} if rank == 1 else {})))
    # Regression: all others waited until their deadline for a rank without a required argument.
    start, words = time.monotonic(), {1: "missing 1 required .*hidden", 0: "^rank 1 could not make its Co"}
    without = {name: size for name, size in sizes(world).items() if rank != 1 or name != "hidden"}
    for local in node, moe_a2a.Communicator(node, timeout=20):
        with pytest.raises(
            (TypeError, RuntimeError), match=words.get(rank, "the call of rank . failed on its node, 0")
        ):
            TwoLevelExpertParallel(local, rail, **without)
    assert time.monotonic() - start < ranks.slack(8)
    with local, TwoLevelExpertParallel(node, rail, **sizes(world)) as two:
        two.check()


def test_wrong_arguments_are_refused_on_every_rank():
    run((2, 2), arguments_program)


class Calls:
    """Of four ranks, of which rank 1 makes the bad ones. Whoever waits for it learns of its error at once, and the object
    stays usable."""

    def __init__(self, two, seed):
        self.two, self.rank = two, two.rank
        generator = torch.Generator().manual_seed(1000 * seed + two.rank)
        self.x, _, self.topk_weights = batch(generator, T, two.num_experts)
        self.topk_idx = torch.arange(K).repeat(T, 1) * 5 % two.num_experts  # every token needs both nodes
        self.expected = self.combine(self.dispatch())

    def dispatch(self):
        return self.two.dispatch(self.x, self.topk_idx, self.topk_weights)

    def rows(self, handle):
        return scaled_rows(handle, 4 * self.rank)

    def combine(self, handle):
        return self.two.combine(self.rows(handle), handle)

    def check_usable(self):
        assert torch.equal(self.combine(self.dispatch()), self.expected)

    def refused(self, bad, good, error, match):
        """bad() on rank 1 alone; good() on the others, of which each that needs rank 1 is refused."""
        fails, start = self.rank == 1, time.monotonic()
        with pytest.raises(error if fails else moe_a2a.PeerRefusedError, match=match if fails else None):
            bad() if fails else good()
        assert time.monotonic() - start < ranks.slack(8), "a rank waited for its deadline"
        self.check_usable()


def bad_dispatches(calls):
    two, x, topk_idx = calls.two, calls.x, calls.topk_idx

    def good():
        two.dispatch(x, topk_idx)

    def refused(*args, match, **how):
        calls.refused(lambda: two.dispatch(*args, **how), good, (ValueError, TypeError), match)

    refused([1.0], topk_idx, match="x is a list on rank 1; pass a torch.Tensor")
    refused(x, None, match="topk_idx is None on rank 1")
    refused(x[:, 1:], topk_idx, match=r"x has shape \[40, 143\], expected \[num_tokens, hidden=144\] on rank 1")
    refused(x.double(), topk_idx, match="x on rank 1 has dtype torch.float64")
    refused(torch.ones(T + 1, H), topk_idx, match="num_tokens=41 > num_max_tokens_per_rank=40 on rank 1")
    refused(x, topk_idx + 14, match=r"topk_idx\[\d+, \d\]=\d+ is not in \[-1, num_experts=16\) on rank 1")
    refused(x, topk_idx, calls.topk_weights[1:], match="topk_weights has shape")
    refused(x, topk_idx, quantize="fp4", match="quantize='fp4' is unknown on rank 1")
    refused(x, topk_idx, layout="rowss", match="layout='rowss' is unknown on rank 1")
    refused(x, topk_idx, num_blocks=-1, match="num_blocks=-1 is not in")
    refused(x, topk_idx, axis=1, match="unexpected keyword argument 'axis'")
    refused(x.clone().requires_grad_(), topk_idx, match="x requires grad, which this call would not record")
    refused(x, topk_idx, handle=3, match="both handle= and topk_idx|handle is a int on rank 1")

    def out_of_memory(*args, **how):
        raise MemoryError("none")

    def fails_within():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(two.local, "_core_to_dispatch", out_of_memory)
            good()

    calls.refused(fails_within, good, MemoryError, "none")


def bad_combines(calls):
    two, rank = calls.two, calls.rank

    def refused(match, bad):
        handle = calls.dispatch()
        y = calls.rows(handle)
        errors = (ValueError, TypeError, RuntimeError)
        calls.refused(lambda: bad(y, handle), lambda: two.combine(y, handle), errors, match)
        assert not handle.is_open

    refused("y is a list on rank", lambda y, handle: two.combine([1.0], handle))
    refused("y has dtype torch.bfloat16", lambda y, handle: two.combine(y.bfloat16(), handle))
    refused(
        r"out is \[3\] of torch.float32 on cpu on rank 1, expected \[40, 144\]",
        lambda y, handle: two.combine(y, handle, out=torch.ones(3)),
    )
    refused("wire='q9' is unknown on rank", lambda y, handle: two.combine(y, handle, wire="q9"))
    handle = calls.dispatch()
    with pytest.raises((TypeError, moe_a2a.PeerRefusedError)) as caught:
        two.combine([1.0] if rank == 2 else calls.rows(handle), handle)
    assert str(caught.value).startswith("node 1, whose rank 0 is rank 2: ") == (two.node == 1)
    for call in two.combine, two.experts, lambda y: two.combine(y, 1):
        handle = calls.dispatch()
        y = calls.rows(handle)
        missing = r"missing \d required|handle is a int on rank|rank"
        with pytest.raises(TypeError if rank == 1 else moe_a2a.PeerRefusedError, match=missing):
            call(y) if rank == 1 else two.combine(y, handle)
        assert handle.is_open == (rank == 1)
        handle.release()
        calls.check_usable()


def calls_that_differ(calls):
    two, x, topk_idx = calls.two, calls.x, calls.topk_idx
    with pytest.raises(
        moe_a2a.CallMismatchError, match=rf"rank {calls.rank} called .*, rank \d of node {1 - two.node} "
    ):
        two.dispatch(x, topk_idx, quantize="fp8" if two.node else None)
    calls.check_usable()
    for has_bytes in two.node == 1, calls.rank == 1, calls.rank % 2 == 1:  # the last: on both nodes alike
        scales = torch.ones(T, 5, dtype=torch.uint8) if has_bytes else torch.ones(T, 2)
        errors = (moe_a2a.CallMismatchError, moe_a2a.PeerRefusedError)
        with pytest.raises(errors, match="float8 rows|failed on its node"):
            two.dispatch(x.to(torch.float8_e4m3fn), topk_idx, x_scales=scales)
        calls.check_usable()
    handle = calls.dispatch()
    with pytest.raises(moe_a2a.CallMismatchError, match=r"called (dispatch|combine of dispatch \d+), rank"):
        two.dispatch(x, topk_idx) if two.node else calls.combine(handle)
    if handle.is_open:
        handle.release()
    calls.check_usable()
    handles = [calls.dispatch() for _ in range(2)]
    with pytest.raises(moe_a2a.CallMismatchError, match=r"called combine of dispatch \d+, rank"):
        calls.combine(handles[two.node])
    handles[1 - two.node].release()
    calls.check_usable()


def calls_program(world, num_nodes, num_local, seed, make_calls):
    with TwoLevelExpertParallel(*groups(num_nodes, num_local), **sizes(world, dtype=torch.float32)) as two:
        make_calls(Calls(two, seed))


@pytest.mark.parametrize("make_calls", [bad_dispatches, bad_combines, calls_that_differ])
def test_bad_calls(make_calls, session_seed):
    run((2, 2), calls_program, session_seed % 10_000, make_calls)


def dead_rank_program(world, num_nodes, num_local, where):
    """Rank 3 dies in its dispatch, before or after the exchange between the nodes, or in its combine."""
    timeout = 3
    with TwoLevelExpertParallel(
        *groups(num_nodes, num_local), **sizes(world, dtype=torch.float32, timeout=timeout)
    ) as two:
        generator = torch.Generator().manual_seed(world.rank())
        x, topk_idx, topk_weights = batch(generator, T, two.num_experts)
        start = time.monotonic()
        with pytest.raises((moe_a2a.PeerTimeoutError, moe_a2a.PeerRefusedError, RuntimeError)):
            for call in range(10):
                if two.rank == 3 and call == 2 and where == "dispatch":
                    os._exit(0)
                if two.rank == 3 and call == 2 and where == "exchange":
                    two.local.dispatch = lambda *args, **how: os._exit(0)
                handle = two.dispatch(x, topk_idx, topk_weights)
                if two.rank == 3 and call == 2:
                    os._exit(0)
                two.combine(scaled_rows(handle, 4 * two.rank), handle)
        assert time.monotonic() - start < ranks.slack(4 * timeout + 4)


@pytest.mark.parametrize("where", ["dispatch", "exchange", "combine"])
def test_a_dead_rank(where):
    assert run((2, 2), dead_rank_program, where, mortal={3})[3] == DIED
