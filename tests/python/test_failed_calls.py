"""If a call fails on one rank before its launch, for any reason, the peers learn of it and nobody waits until a deadline.

Not only of ValueError and TypeError: a wrong or closed handle, MemoryError, num_blocks=tensor([1, 2]) and KeyboardInterrupt
would also leave the peers waiting until their deadline, and the object would be lost on all ranks.
"""

import time
from unittest import mock

import on_device
import pytest
import torch
from refused_calls import REFUSED, REFUSER, SALT, Raises, run, small_batches  # noqa: F401  (a fixture)
from small_calls import CONFIG, expected_output, experts, good_call, make_inputs

import moe_a2a
from moe_a2a import calls

pytestmark = on_device.TESTS


class UnprintableError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


FAILURES = {
    "memory": (MemoryError("no memory"), "MemoryError: no memory"),
    "runtime": (RuntimeError("can't start new thread"), "RuntimeError: can't start new thread"),
    "interrupt": (KeyboardInterrupt(), "KeyboardInterrupt"),
    "exit": (SystemExit(3), "SystemExit: 3"),
    "no text": (UnprintableError(), "UnprintableError"),
    "surrogates": (RuntimeError("\udcff"), r"RuntimeError: \\udcff"),
    "long": (RuntimeError("é" * 600), "RuntimeError: é{200,300}$"),
    "empty": (OSError(), "OSError"),
}


@pytest.mark.parametrize("halves", [False, True], ids=["one call", "halves"])
@pytest.mark.parametrize("name", FAILURES)
def test_dispatch_fails_for_any_reason(name, halves):
    error, words = FAILURES[name]

    def program(ep, group):
        for _ in range(3):  # more often than there are buffers
            call = ep.dispatch_send if halves else ep.dispatch
            if ep.rank == REFUSER:
                with pytest.raises(type(error)) as raised:
                    call(*make_inputs(ep), num_blocks=Raises(error))
                assert raised.value is error
            else:
                with pytest.raises(REFUSED, match=rf"rank 1 refused its call: {words}"):
                    on_device.dispatch(ep, *make_inputs(ep))

    run(program)


@pytest.mark.parametrize("halves", [False, True], ids=["one call", "halves"])
@pytest.mark.parametrize("name", FAILURES)
def test_combine_fails_for_any_reason_and_is_tried_again(name, halves):
    error, words = FAILURES[name]

    def program(ep, group):
        handle = ep.dispatch(*make_inputs(ep, SALT))
        y = experts(handle)
        for _ in range(3):
            if ep.rank == REFUSER:
                with pytest.raises(type(error)):
                    (ep.combine_send if halves else ep.combine)(y, handle, num_blocks=Raises(error))
            else:
                with pytest.raises(REFUSED, match=rf"rank 1 refused its call: {words}"):
                    on_device.combine(ep, y, handle)
            assert handle.is_open
            group.all_gather(None)  # the refusing rank must not retry before the others have observed the refusal
        assert torch.equal(ep.combine(y, handle), expected_output(ep, SALT))
        assert not handle.is_open

    run(program)


BAD_CALLS = {
    "missing argument": (lambda ep, x, idx, w: ep.dispatch(), TypeError, "missing"),
    "unknown argument": (lambda ep, x, idx, w: ep.dispatch(x, idx, w, blocks=3), TypeError, "blocks"),
    "handle=5": (lambda ep, x, idx, w: ep.dispatch(x, handle=5), TypeError, "handle is a int"),
    "num_blocks tensor": (lambda ep, x, idx, w: ep.dispatch(x, idx, w, num_blocks=torch.tensor([1, 2])), TypeError,
                          "num_blocks=tensor"),
    "layout é": (lambda ep, x, idx, w: ep.dispatch(x, idx, w, layout="é" * 600), ValueError, "layout='é+"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_call_that_is_wrong_in_itself(name):
    call, exception, words = BAD_CALLS[name]

    def program(ep, group):
        for _ in range(3):
            if ep.rank == REFUSER:
                with pytest.raises(exception, match=words):
                    call(ep, *make_inputs(ep))
            else:
                with pytest.raises(REFUSED, match=words):
                    on_device.dispatch(ep, *make_inputs(ep))

    run(program)


# ---- handles

WRONG_HANDLES = {
    "int": lambda closed, foreign: 5,
    "none": lambda closed, foreign: None,
    "closed": lambda closed, foreign: closed,
    "foreign": lambda closed, foreign: foreign,
}


@pytest.mark.parametrize("call", ["combine", "combine_send"])
@pytest.mark.parametrize("name", WRONG_HANDLES)
def test_a_wrong_handle_refuses_the_combine_of_every_open_one(name, call):
    def program(ep, group):
        with moe_a2a.ExpertParallel(group, **CONFIG) as other:
            foreign = other.dispatch(*make_inputs(other))
            closed = ep.dispatch(*make_inputs(ep))
            ep.combine(experts(closed), closed)
            handle = ep.dispatch(*make_inputs(ep, SALT))
            y = experts(handle)
            if ep.rank == REFUSER:
                with pytest.raises((TypeError, RuntimeError), match=r"handle .*"):
                    getattr(ep, call)(y, WRONG_HANDLES[name](closed, foreign))
            else:
                with pytest.raises(REFUSED, match="rank 1 refused its call: .*handle"):
                    on_device.combine(ep, y, handle)
            group.all_gather(None)
            assert torch.equal(ep.combine(y, handle), expected_output(ep, SALT))
            foreign.release()

    run(program)


def test_refusals_of_one_rank_do_not_hide_those_of_another():
    """Regression: ranks numbered their attempts, and one that had failed twice waited in vain for one that failed once."""

    def program(ep, group):
        handle = ep.dispatch(*make_inputs(ep, SALT))
        y = experts(handle)
        if ep.rank == 2:
            for _ in range(3):
                with pytest.raises(TypeError, match="handle is a int"):
                    ep.combine(y, 5)
        group.all_gather(None)
        if ep.rank == REFUSER:
            with pytest.raises(ValueError, match="y has shape"):
                ep.combine(y[:, :-1], handle)
        else:
            with pytest.raises(REFUSED):
                on_device.combine(ep, y, handle)
        group.all_gather(None)
        for _ in range(4):  # a late refusal may be reported again
            try:
                out = on_device.combine(ep, y, handle)
            except REFUSED:
                continue
            assert torch.equal(out, expected_output(ep, SALT))
            break
        assert not handle.is_open

    run(program)


def test_combine_recv_in_the_place_of_a_refused_combine():
    """The refusing rank has sent nothing, so its peers cannot finish: all ranks raise, and combine() ends the handle on all."""

    def program(ep, group):
        handle = ep.dispatch(*make_inputs(ep, SALT))
        y = experts(handle)
        if ep.rank == REFUSER:
            with pytest.raises(ValueError, match="y has shape"):
                ep.combine(y[:, :-1], handle)
        else:
            with pytest.raises(REFUSED):
                on_device.combine(ep, y, handle)
        group.all_gather(None)
        if ep.rank == REFUSER:
            with pytest.raises(RuntimeError, match="is received on rank 1"):
                ep.combine_recv(handle)
        else:
            with pytest.raises(REFUSED, match="rank 1 refused its call: .*combine_recv"):
                ep.combine_recv(handle)
                on_device.settle(ep)
        group.all_gather(None)
        assert torch.equal(ep.combine(y, handle), expected_output(ep, SALT))

    run(program)


def test_a_presummed_combine_is_tried_again():
    """When one launch does both halves, a rank's own sums stay in y; a retry finds them there again."""

    def program(ep, group):
        handle = ep.dispatch(*make_inputs(ep, SALT))
        rows = handle.recv_rows.long()
        y = torch.full_like(handle.recv_x, torch.nan)
        y[rows] = 2 * handle.recv_x[rows]
        if ep.rank == REFUSER:
            with pytest.raises(ValueError, match="y has shape"):
                ep.combine(y[1:], handle, presummed=True)
        else:
            with pytest.raises(REFUSED):
                on_device.combine(ep, y, handle, presummed=True)
        group.all_gather(None)
        out = ep.combine(y, handle, presummed=True)
        x, topk_idx, _ = make_inputs(ep, SALT)
        owners = [set((row[row >= 0] // ep.num_local_experts).tolist()) for row in topk_idx]
        assert torch.equal(out, torch.stack([2 * len(ranks) * row for ranks, row in zip(owners, x, strict=True)]))

    run(program)


def test_a_rank_that_releases_while_the_others_combine():
    """It will never send its sums: the others' combine is refused for good, and their handle is closed."""

    def program(ep, group):
        for _ in range(3):
            handle = ep.dispatch(*make_inputs(ep, SALT))
            y = experts(handle)
            if ep.rank == REFUSER:
                handle.release()
            else:
                with pytest.raises(REFUSED, match="rank 1 refused its call: it released the handle without a combine"):
                    on_device.combine(ep, y, handle)
            assert not handle.is_open

    run(program)


def test_a_combine_that_is_refused_for_good_ends_the_handle_on_every_rank():
    """Regression: a peer could find the refusal of an attempt before that for good. Its handle stayed open, and the ranks took
    different buffers for a later dispatch."""

    def release_late(handle):
        time.sleep(0.05)
        handle._core.release(handle._handle)

    def program(ep, group):
        kept = []
        for _ in range(3):
            handle = ep.dispatch(*make_inputs(ep, SALT))
            kept.append(handle)
            if ep.rank == REFUSER:
                with (
                    mock.patch.object(type(handle), "release", release_late),
                    pytest.raises(OSError, match="no disk"),
                    calls.combine_refused_if_failed(handle),
                ):
                    raise OSError("no disk")
            else:
                with pytest.raises(REFUSED, match="rank 1 refused its call: OSError: no disk"):
                    on_device.combine(ep, experts(handle), handle)
            assert not handle.is_open
        good_call(ep)

    run(program)


def test_interrupted_when_the_dispatch_has_been_launched(monkeypatch):
    """The rank has no handle to continue with, but its peers have: their combine is refused for good."""
    sent_by = moe_a2a.ExpertParallel._sent_by

    def interrupted(ep, *args):
        handle = sent_by(ep, *args)
        if ep.rank == REFUSER and ep.is_interrupted:
            raise KeyboardInterrupt
        return handle

    monkeypatch.setattr(moe_a2a.ExpertParallel, "_sent_by", interrupted)

    def program(ep, group):
        for _ in range(3):
            ep.is_interrupted = True
            if ep.rank == REFUSER:
                with pytest.raises(KeyboardInterrupt):
                    ep.dispatch(*make_inputs(ep, SALT))
            else:
                handle = ep.dispatch(*make_inputs(ep, SALT))
                with pytest.raises(REFUSED, match="rank 1 refused its call: KeyboardInterrupt"):
                    on_device.combine(ep, experts(handle), handle)
                assert not handle.is_open
            ep.is_interrupted = False

    if on_device.RANKS_ARE_PROCESSES:
        pytest.skip("patches the ranks' own package")
    run(program)


# ---- bad routing that only the receiver detects


@on_device.cpu_only
@pytest.mark.parametrize("halves", [False, True], ids=["one call", "halves"])
def test_masked_layout_without_room(halves):
    """4 tokens per rank, all ids 0: rank 0 has 16 routes to one expert, and positions for 12. It raises RoutingError. The
    others, whose part was right, learn of it when they combine."""

    def program(ep, group):
        for _ in range(3):
            x = make_inputs(ep)[0]
            topk_idx = torch.zeros(5, 2, dtype=torch.int64)
            if ep.rank == 0:
                with pytest.raises(moe_a2a.RoutingError, match="12 routes.*masked.*rank 0"):
                    if halves:
                        ep.dispatch_recv(ep.dispatch_send(x, topk_idx), layout="masked")
                    else:
                        ep.dispatch(x, topk_idx, layout="masked")
            else:
                handle = ep.dispatch(x, topk_idx, layout="masked")
                with pytest.raises(REFUSED, match="rank 0 refused its call: 12 routes found no room in the masked"):
                    ep.combine(torch.zeros(4, 18, ep.hidden), handle)
                assert not handle.is_open

    run(program)


# ---- what cannot be reported


def test_a_closed_object_says_so():
    def program(group):
        ep = moe_a2a.ExpertParallel(group, **CONFIG)
        x, topk_idx, weights = make_inputs(ep)
        handle = ep.dispatch(x, topk_idx, weights)
        group.all_gather(None)
        ep.close()
        for call in (lambda: ep.dispatch(x, topk_idx), lambda: ep.combine(x, handle), lambda: ep.combine_recv(handle)):
            with pytest.raises(RuntimeError, match="closed"):
                call()

    on_device.run(2, program)


@on_device.cpu_only
def test_nobody_is_to_be_told_once_a_rank_is_lost(caplog):
    """Regression: "could not tell its peers that its call failed" in the log, beside errors that the peers had raised too."""

    def program(group):
        with moe_a2a.ExpertParallel(group, **{**CONFIG, "timeout": 1}) as ep, moe_a2a.Collectives(ep._comm) as coll:
            x, topk_idx, _ = make_inputs(ep)
            if ep.rank == 0:
                with pytest.raises(moe_a2a.PeerTimeoutError):
                    ep.dispatch(x, topk_idx)
            group.all_gather(None)
            for _ in range(ep.num_buffers + 1):
                for call in (
                    lambda: ep.dispatch(x, None),
                    lambda: ep.combine(x, None),
                    lambda: coll.all_reduce(x, "mean"),
                ):
                    with pytest.raises((ValueError, TypeError, moe_a2a.PeerTimeoutError)):
                        call()

    on_device.run(2, program)
    assert "tell its peers" not in caplog.text


@pytest.mark.parametrize(
    "error", [UnprintableError(), RuntimeError("\udcff"), OSError()], ids=lambda error: type(error).__name__
)
def test_words_of_any_error_can_be_sent(error):
    assert calls.words_of(error).encode()


@pytest.mark.parametrize("num_tokens", [5, 0])
@pytest.mark.parametrize("queues_combine", [False, True])
def test_float8_rows_on_one_rank_only(num_tokens, queues_combine):
    """The ranks took what they received for rows like their own: NaNs and 1e38, without an error."""

    def program(ep, group):
        is_float8 = group.rank == REFUSER
        own, other = ("float8", r"rank \d float32") if is_float8 else ("float32", f"rank {REFUSER} float8")
        inputs = make_inputs(ep, SALT, num_tokens if is_float8 else 5)
        with pytest.raises(
            moe_a2a.CallMismatchError, match=f"rank {ep.rank} dispatched {own} rows, {other} rows;"
        ) as raised:
            handle = ep.dispatch(*inputs, quantize="fp8" if is_float8 else None)
            if queues_combine:  # only on a GPU: on the CPU dispatch() has raised
                sums = inputs[0].new_zeros(ep.num_ranks * ep.num_max_tokens_per_rank, ep.hidden)
                ep.combine(sums, handle, presummed=True)
            on_device.settle(ep)
        assert (raised.value.peer == REFUSER) != is_float8

    run(program)
