"""A rank refuses its call because of its arguments: what the others observe, and that all continue together."""

import on_device
import pytest
import torch
from refused_calls import REFUSED, SALT, run, small_batches  # noqa: F401  (a fixture)
from small_calls import CONFIG, expected_output, experts, good_call, make_inputs

pytestmark = on_device.TESTS


def bad_dispatch(ep, call=None):
    x, topk_idx, weights = make_inputs(ep)
    with pytest.raises(ValueError, match=f"hidden={ep.hidden}.*rank {ep.rank}"):
        (call or ep.dispatch)(x[:, 1:], topk_idx, weights)


def test_through_the_halves():
    def program(ep, group):
        for _ in range(5):
            if ep.rank == 2:
                bad_dispatch(ep, ep.dispatch_send)
            else:
                handle = ep.dispatch_send(*make_inputs(ep))
                with pytest.raises(REFUSED, match="rank 2 refused .*hidden=16"):
                    ep.dispatch_recv(handle)
                    on_device.settle(ep)
                with pytest.raises(RuntimeError, match="closed"):
                    ep.combine(torch.zeros(36, ep.hidden, device=ep.device), handle)

    run(program)


def test_two_of_three_refuse():
    def program(ep, group):
        for _ in range(5):
            if ep.rank == 0:
                with pytest.raises(REFUSED) as raised:
                    on_device.dispatch(ep, *make_inputs(ep))
                assert raised.value.peer in (1, 2)
            else:
                bad_dispatch(ep)

    run(program)


def test_all_refuse():
    run(lambda ep, group: [bad_dispatch(ep) for _ in range(5)])


def test_with_another_handle_open():
    def program(ep, group):
        handle = ep.dispatch(*make_inputs(ep, 7))
        for _ in range(3):
            if ep.rank == 1:
                bad_dispatch(ep)
            else:
                with pytest.raises(REFUSED):
                    on_device.dispatch(ep, *make_inputs(ep))
        assert torch.equal(ep.combine(experts(handle), handle), expected_output(ep, 7))

    run(program)


@pytest.mark.parametrize("num_buffers", [1, 3])
def test_the_buffer_of_a_refused_dispatch_is_free(num_buffers, monkeypatch):
    """Also on a GPU, where the call has returned a handle before the refusal is known, and the caller keeps it."""
    monkeypatch.setitem(CONFIG, "num_buffers", num_buffers)

    def program(ep, group):
        others = [ep.dispatch(*make_inputs(ep, 7)) for _ in range(num_buffers - 1)]
        kept = []
        for call in range(2 * num_buffers + 1):
            if ep.rank == 1:
                bad_dispatch(ep)
            else:
                with pytest.raises(REFUSED):
                    kept.append(ep.dispatch(*make_inputs(ep)))
                    on_device.settle(ep)
            assert not any(handle.is_open for handle in kept)
            good_call(ep, call)
            if others:  # so that another buffer is the free one
                handle = others.pop(0)
                assert torch.equal(ep.combine(experts(handle), handle), expected_output(ep, 7))
        assert len(kept) == (2 * num_buffers + 1 if on_device.IS_GPU and ep.rank != 1 else 0)

    run(program, num_ranks=2)


def test_refusals_in_turn_without_anything_between():
    """Each rank refuses every third call, at its own pace: no refusal may be taken for another call's."""

    def program(ep, group):
        for call in range(60):
            if call % 3 == ep.rank:
                bad_dispatch(ep)
                continue
            with pytest.raises(REFUSED) as raised:
                on_device.dispatch(ep, *make_inputs(ep, call))
            assert raised.value.peer == call % 3
            assert f"on rank {call % 3}" in str(raised.value)

    run(program)


def combine_after_late_refusals(ep, y, handle, most):
    """A refusal made while this rank was in no combine is reported in its next one, unless the sums arrive first."""
    for _ in range(most):
        try:
            return ep.combine(y, handle)
        except REFUSED:
            pass
    return ep.combine(y, handle)


def refused_combine(ep, group, refuser):
    """Returns a handle whose combine one rank has refused."""
    x, topk_idx, weights = make_inputs(ep, SALT)
    assert (
        topk_idx // ep.num_local_experts == refuser
    ).any()  # a rank that needs nothing from the refuser notices nothing
    handle = ep.dispatch(x, topk_idx, weights)
    y = experts(handle)
    if ep.rank == refuser:
        with pytest.raises(ValueError, match=rf"y has shape .*rank {refuser}"):
            ep.combine(y[:, :-1], handle)
    else:
        with pytest.raises(REFUSED, match=rf"rank {refuser} refused"):
            on_device.combine(ep, y, handle)
    group.all_gather(None)  # the refuser must not retry before the others have observed the refusal
    return handle, y


@on_device.cpu_only
def test_combine_refused_again_and_again():
    def program(ep, group):
        handle, y = refused_combine(ep, group, 0)
        for refuser in (1, 0, 2):
            if ep.rank == refuser:
                if refuser != 0:  # it has sent what the others need: only its own `out` can be bad now
                    with pytest.raises(ValueError, match=f"out .*rank {refuser}"):
                        ep.combine(y, handle, out=torch.empty(1, 1))
                else:
                    with pytest.raises(ValueError, match="y .*rank 0"):
                        ep.combine(y[:, :-1], handle)
            group.all_gather(None)
        if ep.rank == 0:  # nothing was reported to it since the first refusal
            out = ep.combine(y, handle)
        else:
            out = combine_after_late_refusals(ep, y, handle, most=1)  # rank 0 refused twice; the others saw one refusal
        assert torch.equal(out, expected_output(ep, SALT))

    run(program)


def test_combine_refused_and_given_up():
    """Nobody retries: all release the handle, in whatever stage it is on their rank (on a GPU: closed)."""

    def program(ep, group):
        for _ in range(4):
            handle, _ = refused_combine(ep, group, 1)
            handle.release()

    run(program)


def test_dropped_handles_are_taken_back():
    """Handles that are neither combined nor released end with their last reference."""

    def program(ep, group):
        for salt in range(7):
            ep.dispatch(*make_inputs(ep, salt))
        handle = ep.dispatch(*make_inputs(ep, 1))
        assert torch.equal(ep.combine(experts(handle), handle), expected_output(ep, 1))

    run(program)
