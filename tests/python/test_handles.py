"""Handles: two may be open, each serves one combine of its own object; all other uses raise."""

import on_device
import pytest
import ranks
import torch
from small_calls import CONFIG, all_inputs, expected_output, experts, good_call, make_inputs

import moe_a2a
from moe_a2a import devices
from moe_a2a.experts import swiglu_experts

pytestmark = on_device.TESTS


def run(program, num_ranks=3, **config):
    def with_ep(group):
        with moe_a2a.ExpertParallel(group, **{**CONFIG, **config}) as ep:
            program(ep)
            if not ep_is_closed(ep):
                good_call(ep)

    on_device.run(num_ranks, with_ep)


def ep_is_closed(ep):
    try:
        ep.check()
    except RuntimeError as error:
        return "closed" in str(error)
    return False


@on_device.cpu_only
def test_expert_x_is_kept_for_every_stream_that_reads_it(monkeypatch):
    """It is made once, on the stream of the first read; experts() may read it on another, and then the handle is dropped."""
    kept = []
    monkeypatch.setattr(devices, "keep_for_current_stream", lambda *tensors: kept.extend(tensors))
    (group,) = moe_a2a.thread_group(1)
    with moe_a2a.ExpertParallel(group, **CONFIG) as ep:
        handle = ep.dispatch(*make_inputs(ep), layout="expert_major")
        expert_x = handle.expert_x
        assert not kept
        gate_up, down = torch.ones(ep.num_local_experts, 8, ep.hidden), torch.ones(ep.num_local_experts, ep.hidden, 4)
        swiglu_experts(handle, gate_up, down)
        assert len(kept) == 1 and kept[0] is expert_x
        handle.release()


@pytest.mark.parametrize("num_buffers", [1, 2, 3])
def test_as_many_open_handles_as_buffers_and_one_more_raises(num_buffers):
    def program(ep):
        handles = [ep.dispatch(*make_inputs(ep, salt)) for salt in range(num_buffers)]
        message = rf"(?s){num_buffers} .*open.*rank {ep.rank}.*num_buffers={num_buffers}"
        with pytest.raises(RuntimeError, match=message):
            ep.dispatch(*make_inputs(ep))
        # Open handles are unaffected; combined here in the opposite order.
        for salt, handle in reversed(list(enumerate(handles))):
            out = ep.combine(experts(handle), handle)
            assert torch.equal(out, expected_output(ep, salt))

    run(program, num_buffers=num_buffers)


def test_interleaved_halves_of_two_handles():
    def program(ep):
        first = ep.dispatch_send(*make_inputs(ep, 1))
        second = ep.dispatch_send(*make_inputs(ep, 2))
        ep.dispatch_recv(first)
        y = experts(first)
        ep.combine_send(y, first)
        ep.dispatch_recv(second)
        ep.combine_send(experts(second), second)
        assert torch.equal(ep.combine_recv(second), expected_output(ep, 2))
        assert torch.equal(ep.combine_recv(first), expected_output(ep, 1))

    run(program)


def test_a_handle_serves_one_combine():
    def program(ep):
        handle = ep.dispatch(*make_inputs(ep))
        y = experts(handle)
        ep.combine(y, handle)
        with pytest.raises(RuntimeError, match=rf"handle that is closed on rank {ep.rank}"):
            ep.combine(y, handle)
        with pytest.raises(RuntimeError, match="closed"):
            ep.combine_send(y, handle)

    run(program)


def test_the_halves_in_a_wrong_order():
    def program(ep):
        handle = ep.dispatch_send(*make_inputs(ep))
        y = torch.zeros(ep.num_ranks * ep.num_max_tokens_per_rank * ep.num_topk, ep.hidden, device=ep.device)
        with pytest.raises(RuntimeError, match="not yet received"):
            ep.combine_send(y, handle)
        with pytest.raises(RuntimeError, match="not yet received"):
            ep.combine_recv(handle)
        with pytest.raises(RuntimeError, match="not yet received"):
            handle.recv_x  # noqa: B018
        ep.dispatch_recv(handle)
        with pytest.raises(RuntimeError, match="is received"):
            ep.dispatch_recv(handle)
        with pytest.raises(RuntimeError, match="is received"):
            ep.combine_recv(handle)
        ep.combine_send(experts(handle), handle)
        assert torch.equal(ep.combine_recv(handle), expected_output(ep))

    run(program)


def test_a_handle_of_another_object_is_refused():
    def with_two(group):
        with (
            moe_a2a.ExpertParallel(group, **CONFIG) as one,
            moe_a2a.ExpertParallel(group, **CONFIG) as other,
        ):
            handle = one.dispatch(*make_inputs(one, 1))
            foreign = other.dispatch(*make_inputs(other, 2))
            y, foreign_y = experts(handle), experts(foreign)
            for call in (one.combine, one.combine_send):
                with pytest.raises(RuntimeError, match="another ExpertParallel"):
                    call(foreign_y, foreign)
            with pytest.raises(RuntimeError, match="another ExpertParallel"):
                one.combine_recv(foreign)
            with pytest.raises(RuntimeError, match="another ExpertParallel"):
                one.dispatch(make_inputs(one)[0], handle=foreign)
            assert torch.equal(other.combine(foreign_y, foreign), expected_output(other, 2))
            for _ in range(2 * 3):  # each wrong call of the other rank may be reported here
                try:
                    out = on_device.combine(one, y, handle)
                except moe_a2a.PeerRefusedError:
                    continue
                assert torch.equal(out, expected_output(one, 1))
                break
            assert not handle.is_open

    on_device.run(2, with_two)


@pytest.mark.parametrize("not_a_handle", [None, 3, "handle"])
def test_something_that_is_no_handle(not_a_handle):
    def program(ep):
        with pytest.raises(TypeError, match=f"handle is a {type(not_a_handle).__name__} on rank {ep.rank}"):
            ep.combine(torch.zeros(1, ep.hidden, device=ep.device), not_a_handle)

    run(program)


def test_release_gives_the_buffer_back():
    def program(ep):
        for salt in range(5):
            ep.dispatch(*make_inputs(ep, salt)).release()
        handle = ep.dispatch(*make_inputs(ep))
        handle.release()
        handle.release()  # a second release has no effect
        with pytest.raises(RuntimeError, match="closed"):
            ep.combine(torch.zeros(36, ep.hidden, device=ep.device), handle)
        with pytest.raises(RuntimeError, match="closed"):
            handle.recv_x  # noqa: B018
        sent = ep.dispatch_send(*make_inputs(ep))
        sent.release()  # before it was received

    run(program)


def test_a_released_handle_leaves_the_other_open_one_alone():
    """The dispatch after a release takes the released buffer, beside a buffer that is still open."""

    def program(ep):
        kept = ep.dispatch(*make_inputs(ep, 1))
        dropped = ep.dispatch(*make_inputs(ep, 2))
        dropped.release()
        again = ep.dispatch(*make_inputs(ep, 3))
        assert torch.equal(ep.combine(experts(kept), kept), expected_output(ep, 1))
        assert torch.equal(ep.combine(experts(again), again), expected_output(ep, 3))

    run(program)


def test_views_live_until_combine_and_keep_their_memory():
    def program(ep):
        handle = ep.dispatch(*make_inputs(ep))
        view = handle.recv_x
        assert view.data_ptr() == handle.recv_x.data_ptr()
        ep.combine(experts(handle), handle)
        ep.close()
        view.sum()  # undefined values, but valid memory

    run(program)


def test_close_twice_and_use_after_close():
    def program(ep):
        handle = ep.dispatch(*make_inputs(ep))
        y = experts(handle)
        ep.close()
        ep.close()
        calls = {
            "dispatch": lambda: ep.dispatch(*make_inputs(ep)),
            "dispatch_send": lambda: ep.dispatch_send(*make_inputs(ep)),
            "combine": lambda: ep.combine(y, handle),
            "check": ep.check,
            "recv_x": lambda: handle.recv_x,
        }
        for call in calls.values():
            with pytest.raises(RuntimeError, match="closed"):
                call()
        handle.release()  # nothing to give back

    run(program)


def test_dispatch_again_with_the_same_handle():
    def program(ep):
        first = ep.dispatch(*make_inputs(ep, 1))
        x, topk_idx, weights = make_inputs(ep, 1)
        again = ep.dispatch(3 * x, handle=first)
        assert torch.equal(again.expert_offsets, first.expert_offsets)
        everyone = all_inputs(ep, 1)[0]
        num_routes = int(again.expert_offsets[-1])
        row_index = again.expert_row_index[:num_routes].long()
        expected = torch.zeros(ep.num_ranks, ep.num_max_tokens_per_rank, ep.hidden)
        for rank, rows in enumerate(everyone):
            expected[rank, : len(rows)] = 3 * rows
        assert torch.equal(again.recv_x[row_index], expected.flatten(0, 1).to(ep.device)[row_index])
        out = ep.combine(experts(again), again)
        torch.testing.assert_close(out, 3 * expected_output(ep, 1))

    run(program)


def test_attributes():
    def program(ep):
        assert (ep.num_ranks, ep.num_experts, ep.num_local_experts) == (2, 12, 6)
        assert (ep.num_topk, ep.hidden, ep.num_max_tokens_per_rank) == (2, 16, 6)
        assert (ep.dtype, ep.device.type, ep.num_buffers) == (torch.float32, on_device.NAME, 2)
        assert ep.timeout == 10
        # Two buffers, each with the rows of dispatch and of combine.
        assert ep.nbytes >= 2 * 2 * (2 * 6) * 16 * 4
        handle = ep.dispatch(*make_inputs(ep))
        assert handle.num_routes == int(handle.expert_offsets[-1])
        assert handle.recv_x.shape == (12, 16)
        assert handle.expert_row_index.shape == (24,)
        assert handle.expert_offsets.shape == (7,)
        assert handle.expert_row_index.dtype == handle.expert_offsets.dtype == torch.int32
        handle.release()

    run(program, num_ranks=2)


def exchange_handles_by_hand(group):
    """Bootstrap over any channel: here gloo carries the bytes, in Ray an actor call would."""
    group = moe_a2a.as_group(group)
    num_ranks = group.num_ranks
    exchange = moe_a2a.HandleExchange(group.rank, num_ranks)
    with moe_a2a.ExpertParallel(exchange, **CONFIG) as ep:
        with pytest.raises(RuntimeError, match="set_comm_handles"):
            ep.dispatch(*make_inputs(ep))
        handles = group.all_gather(ep.get_comm_handle())
        with pytest.raises(ValueError, match=f"got {num_ranks - 1} handles"):
            ep.set_comm_handles(handles[:-1])
        with pytest.raises(ValueError, match="rank order"):
            ep.set_comm_handles(handles[::-1])
        with pytest.raises(ValueError, match="bytes"):
            ep.set_comm_handles([b"nonsense"] * num_ranks)
        ep.set_comm_handles(handles)
        good_call(ep)
        group.all_gather(None)


def test_explicit_handle_exchange():
    run = on_device.run if on_device.RANKS_ARE_PROCESSES else ranks.run_processes
    run(2, exchange_handles_by_hand)
