"""Values that a caller writes into the views of a handle cannot send a kernel out of bounds.

Regression: h.recv_rows was combine's own list, so h.recv_rows.add_(10**7) and then combine() caused a segmentation fault.
expert_x re-reads expert_offsets, expert_counts and expert_row_index, which are views.
"""

import on_device
import pytest
import torch
from small_calls import expected_output, experts, good_call, make_inputs

import moe_a2a

pytestmark = on_device.TESTS

CONFIG = {
    "num_experts": 12, "num_topk": 2, "hidden": 64, "num_max_tokens_per_rank": 6,
    "dtype": torch.float32, "timeout": 10,
}  # fmt: skip
VIEWS = ("recv_rows", "expert_row_index", "expert_offsets", "expert_counts", "route_weights", "route_src_rank",
         "route_src_token_idx", "num_recv_tokens_per_rank")  # fmt: skip
WRITTEN = (10**7, -(10**7), 2**31 - 1, -(2**31), -1, 1)


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("num_max_ll_tokens", [0, 6])
def test_combine_does_not_read_what_was_written(name, num_max_ll_tokens):
    def program(group):
        with moe_a2a.ExpertParallel(group, num_max_ll_tokens=num_max_ll_tokens, **CONFIG) as ep:
            for salt, value in enumerate(WRITTEN):
                handle = ep.dispatch(*make_inputs(ep, salt))
                y = experts(handle)
                handle.recv_rows  # noqa: B018
                getattr(handle, name).fill_(value)
                if name == "expert_offsets":  # the CPU checks y against it
                    handle.expert_offsets.clamp_(max=len(y))
                assert torch.equal(ep.combine(y, handle), expected_output(ep, salt))

    on_device.run(2, program)


@pytest.mark.parametrize("layout", ["expert_major", "masked"])
@pytest.mark.parametrize("name", ["expert_row_index", "expert_offsets", "expert_counts"])
def test_expert_x_stays_in_its_memory(name, layout):
    """Its rows are then whatever the lists say, and the object still works."""

    def program(group):
        with moe_a2a.ExpertParallel(group, **CONFIG) as ep:
            for salt, value in enumerate(WRITTEN):
                handle = ep.dispatch(*make_inputs(ep, salt), layout=layout)
                getattr(handle, name)[1:].fill_(value)
                guard = [torch.zeros(1 << 12, device=ep.device) for _ in range(8)]
                handle.expert_x  # noqa: B018
                on_device.settle(ep)
                assert not any(bool(memory.any()) for memory in guard)
                handle.release()
            good_call(ep)

    on_device.run(2, program)


def test_views_have_a_storage_that_cannot_grow():
    def program(group):
        with moe_a2a.ExpertParallel(group, **CONFIG) as ep:
            handle = ep.dispatch(*make_inputs(ep))
            for name in (*VIEWS[1:], "recv_x"):
                view = getattr(handle, name)
                with pytest.raises(RuntimeError, match="not resizable"):
                    view.resize_(1 << 24)
            handle.release()

    on_device.run(1, program)


def test_a_row_dtype_that_was_set_by_hand():
    """It determines the size of the rows of recv_x and expert_x."""

    def program(group):
        with moe_a2a.ExpertParallel(group, **CONFIG) as ep:
            handle = ep.dispatch(*make_inputs(ep), layout="masked")
            for dtype in (torch.float8_e4m3fn, torch.float16, torch.float64):
                handle.row_dtype = dtype
                for name in ("recv_x", "expert_x"):
                    with pytest.raises(TypeError, match=r"row_dtype.* on rank 0"):
                        getattr(handle, name)
            handle.row_dtype = torch.float32
            assert torch.equal(ep.combine(2 * handle.expert_x, handle), expected_output(ep))

    on_device.run(1, program)
