"""A dispatch on a rank whose buffers are all open: the rank raises, and its peers learn of it, whatever they wait for."""

import time

import on_device
import pytest
import torch
from gradients import leaf, make_batch, make_ep, make_weights, own_part
from refused_calls import REFUSED, REFUSER, SALT, run, small_batches  # noqa: F401  (a fixture)
from small_calls import expected_output, experts, good_call, make_inputs

import moe_a2a

pytestmark = on_device.TESTS


@pytest.mark.parametrize("num_blocks", [1, 3])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_rank_without_a_free_buffer(num_ranks, num_blocks):
    """It cannot know which buffer its peers have taken; they wait there for a credit that it has not given."""

    def program(ep, group):
        for released in ([0], [1], [0, 1]):
            handles = [ep.dispatch(*make_inputs(ep, salt), num_blocks=num_blocks) for salt in range(2)]
            if ep.rank != REFUSER:
                for i in released:
                    handles[i].release()
            for attempt in range(3):
                if ep.rank == REFUSER:
                    with pytest.raises(RuntimeError, match="2 handles are open on rank 1"):
                        ep.dispatch(*make_inputs(ep))
                elif ep.rank == 2 and attempt == 1:
                    with pytest.raises(ValueError, match="x has shape"):
                        ep.dispatch(make_inputs(ep)[0][:, 1:], make_inputs(ep)[1])
                    on_device.settle(ep)  # it has raised its own error and does not report another's
                else:
                    with pytest.raises(
                        REFUSED, match="refused its call: (RuntimeError: dispatch: 2 handles|x has shape)"
                    ):
                        on_device.dispatch(ep, *make_inputs(ep), num_blocks=num_blocks)
            for handle in handles:
                handle.release()
            good_call(ep)

    run(program, num_ranks)


def test_what_follows_a_call_without_a_free_buffer():
    """On a GPU the combine may be queued before anyone knows. It ends at once, and does not touch the sums of the call
    that still holds the buffer on the refusing rank."""

    def program(ep, group):
        held, other = ep.dispatch(*make_inputs(ep, SALT)), ep.dispatch(*make_inputs(ep))
        y = experts(held)
        group.all_gather(None)
        if ep.rank == REFUSER:
            with pytest.raises(RuntimeError, match="2 handles are open on rank 1"):
                ep.dispatch(*make_inputs(ep, 2))
        else:
            ep.combine_send(y, held)
            held.release()
            with pytest.raises(REFUSED, match="2 handles are open on rank 1"):
                handle = ep.dispatch(*make_inputs(ep, 2))
                ep.combine(torch.full_like(y, torch.nan), handle)
                on_device.settle(ep)
        group.all_gather(None)
        if ep.rank == REFUSER:
            assert torch.equal(ep.combine(y, held), expected_output(ep, SALT))
        other.release()

    run(program)


@pytest.mark.parametrize("num_blocks", [1, 3])
def test_a_rank_that_is_late_is_not_told_of_later_refusals(num_blocks):
    """Its calls in which the refusing rank took part are good, however late. Regression: it took the later refusal for that
    of its own call, and the ranks were out of step."""

    def program(ep, group):
        if ep.rank == 0:
            time.sleep(0.3)
        sent = [ep.dispatch_send(*make_inputs(ep, SALT), num_blocks=num_blocks) for _ in range(2)]
        for _ in range(2):
            with pytest.raises(RuntimeError, match=f"2 handles are open on rank {ep.rank}"):
                ep.dispatch(*make_inputs(ep))
        for handle in sent:
            ep.dispatch_recv(handle)
            assert torch.equal(ep.combine(experts(handle), handle), expected_output(ep, SALT))

    for _ in range(5):
        run(program)


def run_partial_backward(group, seed):
    with make_ep(group, num_buffers=1) as ep:
        layer = moe_a2a.MoELayer(ep, *(leaf(w, ep) for w in own_part(ep, make_weights(ep, seed))))
        batch = make_batch(ep, ep.rank, seed)
        x, topk_idx, topk_weights = (tensor.to(ep.device) for tensor in (batch.x, batch.topk_idx, batch.topk_weights))
        for follows in (
            lambda: layer(x, topk_idx, topk_weights),
            lambda: ep.dispatch(x, topk_idx).release(),
            lambda: ep.dispatch_recv(ep.dispatch_send(x, topk_idx)).release(),
        ):
            layer(x, topk_idx, topk_weights).sum().backward(inputs=[layer.w_down])
            with torch.no_grad():
                follows()
            on_device.settle(ep)


def test_a_backward_pass_that_ends_early_leaves_no_buffer_taken(session_seed):
    """Gradients of the experts only: the handle that combine's backward keeps for dispatch's, nobody could release."""
    on_device.run(2, run_partial_backward, session_seed)
