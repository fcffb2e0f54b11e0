"""A presummed combine of packed rows, one for each landed row, has the bits of one whose y is as long as recv_x."""

import on_device
import pytest
import torch

import moe_a2a
from moe_a2a.row_routes import packed_topk

pytestmark = on_device.TESTS

SEED = 20261127
HIDDEN, TOPK, EXPERTS_PER_RANK, MOST_TOKENS = 64, 3, 2, 40


@pytest.mark.parametrize("in_halves", [False, True], ids=["whole", "halves"])
@pytest.mark.parametrize("wire", [None, "q8"])
@pytest.mark.parametrize("num_max_ll_tokens", [0, MOST_TOKENS], ids=["rows", "ll_words"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_packed_sums(num_ranks, num_max_ll_tokens, wire, in_halves):
    print(f"seed {SEED}")

    def program(group):
        config = {"num_experts": num_ranks * EXPERTS_PER_RANK, "num_topk": TOPK, "hidden": HIDDEN, "dtype": torch.float32,
                  "num_max_tokens_per_rank": MOST_TOKENS, "num_max_ll_tokens": num_max_ll_tokens}  # fmt: skip
        with moe_a2a.ExpertParallel(group, **config) as ep:
            generator = torch.Generator().manual_seed(SEED + ep.rank)
            for num_tokens in (MOST_TOKENS, 0, 7, 31):
                x = torch.randn(num_tokens, HIDDEN, generator=generator).to(ep.device)
                topk_idx = torch.randint(-1, ep.num_experts, (num_tokens, TOPK), generator=generator).to(ep.device)
                sums = []
                for is_packed in (False, True):
                    handle = ep.dispatch(x, topk_idx)
                    y = handle.recv_x * 3
                    if is_packed:
                        packed = packed_topk(handle, len(y))
                        rows, _, _, handle._sum_index, numbers = packed
                        y = y[rows[: numbers[num_ranks - 1]]]
                    if in_halves:
                        ep.combine_send(y, handle, presummed=True, wire=wire)
                        sums.append(ep.combine_recv(handle))
                    else:
                        sums.append(ep.combine(y, handle, presummed=True, wire=wire))
                assert torch.equal(*sums)

    on_device.run(num_ranks, program)


@pytest.mark.parametrize("num_max_ll_tokens", [0, MOST_TOKENS], ids=["rows", "ll_words"])
def test_rows_without_a_place_are_reported(num_max_ll_tokens):
    """Fewer packed rows than have landed: without a place for its sum, a row's would be read from anywhere."""

    def program(group):
        config = {"num_experts": 4, "num_topk": 1, "hidden": HIDDEN, "dtype": torch.float32,
                  "num_max_tokens_per_rank": MOST_TOKENS, "num_max_ll_tokens": num_max_ll_tokens}  # fmt: skip
        with moe_a2a.ExpertParallel(group, **config) as ep:
            topk_idx = torch.arange(8, device=ep.device)[:, None] % 4  # each rank sends four rows to each
            handle = ep.dispatch(torch.ones(8, HIDDEN, device=ep.device), topk_idx)
            rows = handle.recv_rows.long()
            handle._sum_index = packed_topk(handle, 6)[3]
            assert handle._sum_index[rows].tolist() == [0, 1, 2, 3, 4, 5, 0, 0]
            with pytest.raises(moe_a2a.RoutingError, match="y of a combine was too short for 2 routes on rank"):
                ep.check()

    on_device.run(2, program)
