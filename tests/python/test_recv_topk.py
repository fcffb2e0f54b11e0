"""handle.recv_topk() and contiguous_rows(): landed rows and their routes, for experts that weight and sum a row themselves."""

import on_device
import pytest
import torch

import moe_a2a
from moe_a2a.devices import float8_dtype

pytestmark = on_device.TESTS

SEED = 20261123
HIDDEN, TOPK, EXPERTS_PER_RANK, MOST_TOKENS = 32, 4, 3, 40


def tokens_of(num_ranks, rank, call):
    """x, topk_idx with dropped choices, empty tokens and repeated experts, topk_weights: known to every rank."""
    generator = torch.Generator().manual_seed(SEED + 100 * call + rank)
    num_tokens = int(torch.randint(0, MOST_TOKENS + 1, (), generator=generator)) if call else MOST_TOKENS
    shape = (num_tokens, TOPK)
    topk_idx = torch.randint(0, num_ranks * EXPERTS_PER_RANK, shape, generator=generator)
    topk_idx[torch.rand(shape, generator=generator) < 0.3] = -1
    topk_idx[::5] = -1
    x = torch.randn(num_tokens, HIDDEN, generator=generator)
    return x, topk_idx, torch.rand(shape, generator=generator)


def expected_routes(num_ranks, rank, call):
    idx = torch.full((num_ranks * MOST_TOKENS, TOPK), -1)
    weights = torch.zeros(num_ranks * MOST_TOKENS, TOPK)
    for src in range(num_ranks):
        _, topk_idx, topk_weights = tokens_of(num_ranks, src, call)
        for token, (chosen, weighed) in enumerate(zip(topk_idx.tolist(), topk_weights, strict=True)):
            here = [k for k, expert in enumerate(chosen) if expert >= 0 and expert // EXPERTS_PER_RANK == rank]
            row = src * MOST_TOKENS + token
            idx[row, : len(here)] = torch.tensor([chosen[k] % EXPERTS_PER_RANK for k in here], dtype=torch.int64)
            weights[row, : len(here)] = weighed[here]
    return idx, weights


def factor(experts):
    return 1 + experts % 3


def weighted_sums(rows, idx, weights, rank):
    """What a fused MoE does with a row, its local experts and their weights; `rows` of tokens elsewhere may be NaN."""
    scale = (weights * factor(idx + rank * EXPERTS_PER_RANK)).masked_fill(idx < 0, 0).sum(dim=1, keepdim=True)
    return torch.where((idx >= 0).any(dim=1, keepdim=True), rows * scale, torch.nan)


@pytest.mark.parametrize("num_max_ll_tokens", [0, MOST_TOKENS], ids=["rows", "ll_words"])
@pytest.mark.parametrize("layout", ["rows", "expert_major", "masked"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_rows_with_their_experts(num_ranks, layout, num_max_ll_tokens):
    print(f"seed {SEED}")

    def program(group):
        config = {"num_experts": num_ranks * EXPERTS_PER_RANK, "num_topk": TOPK, "hidden": HIDDEN, "dtype": torch.float32,
                  "num_max_tokens_per_rank": MOST_TOKENS, "num_max_ll_tokens": num_max_ll_tokens}  # fmt: skip
        with moe_a2a.ExpertParallel(group, **config) as ep:
            for call in range(5):  # later calls find the rows and routes of earlier ones in the same memory
                x, topk_idx, topk_weights = (part.to(ep.device) for part in tokens_of(num_ranks, ep.rank, call))
                alignment = {"expert_alignment": 16} if layout == "expert_major" else {}
                handle = ep.dispatch(x, topk_idx, topk_weights, layout=layout, **alignment)
                idx, weights = handle.recv_topk()
                for got, expected in zip((idx, weights), expected_routes(num_ranks, ep.rank, call), strict=True):
                    torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=0)
                out = ep.combine(weighted_sums(handle.recv_x, idx, weights, ep.rank), handle, presummed=True)
                scale = (topk_weights * factor(topk_idx)).masked_fill(topk_idx < 0, 0).sum(dim=1, keepdim=True)
                torch.testing.assert_close(out, x * scale, rtol=1e-5, atol=1e-5)

    on_device.run(num_ranks, program)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_as_another_library_wants_them(dtype):
    def program(group):
        config = {"num_experts": 2 * EXPERTS_PER_RANK, "num_topk": TOPK, "hidden": HIDDEN, "dtype": torch.float32}
        with moe_a2a.ExpertParallel(group, num_max_tokens_per_rank=MOST_TOKENS, **config) as ep:
            x, topk_idx, topk_weights = (part.to(ep.device) for part in tokens_of(2, ep.rank, 1))
            handle = ep.dispatch(x, topk_idx, topk_weights)
            idx, weights = handle.recv_topk()
            first = ep.rank * EXPERTS_PER_RANK
            ids, same_weights = handle.recv_topk(first_expert=first, no_expert=77, dtype=dtype)
            assert ids.dtype == dtype and torch.equal(weights, same_weights)
            assert torch.equal(ids.long(), torch.where(idx < 0, 77, idx + first))
            ids, same_weights = handle.recv_topk(first_expert=first, no_expert=None, dtype=dtype)
            assert ids.dtype == dtype and torch.equal(weights, same_weights)
            others = (
                first + EXPERTS_PER_RANK + torch.arange(idx.numel(), device=ep.device).view_as(idx) % EXPERTS_PER_RANK
            )
            assert torch.equal(ids.long(), torch.where(idx < 0, others % (2 * EXPERTS_PER_RANK), idx + first))
            for wrong, error in (
                ({"first_expert": "0"}, rf"first_expert='0' is a str on rank {ep.rank}; pass an int"),
                ({"no_expert": True}, rf"no_expert=True is a bool on rank {ep.rank}; pass an int"),
                ({"dtype": torch.int16}, rf"dtype=torch.int16 on rank {ep.rank}; pass torch.int32 or torch.int64"),
            ):
                with pytest.raises(TypeError, match=error):
                    handle.recv_topk(**wrong)
            handle.release()

    on_device.run(2, program)


def test_without_weights_each_counts_once_and_nothing_is_a_view():
    def program(group):
        config = {"num_experts": 3, "num_topk": TOPK, "hidden": HIDDEN, "num_max_tokens_per_rank": MOST_TOKENS}
        with moe_a2a.ExpertParallel(group, dtype=torch.float32, **config) as ep:
            x, topk_idx, _ = (part.to(ep.device) for part in tokens_of(1, 0, 0))
            handle = ep.dispatch(x, topk_idx)
            idx, weights = handle.recv_topk()
            assert torch.equal(weights, (idx >= 0).float())
            idx.fill_(10**6), weights.fill_(torch.nan)
            y = handle.recv_x[handle.expert_row_index[: handle.num_routes].long()]
            padded = torch.zeros(handle.capacity, HIDDEN, device=ep.device)
            padded[: len(y)] = y
            torch.testing.assert_close(ep.combine(padded, handle), x * (topk_idx >= 0).sum(dim=1, keepdim=True))
            with pytest.raises(RuntimeError, match="closed|combine|released"):
                handle.recv_topk()

    on_device.run(1, program)


@pytest.mark.parametrize(("kind", "hidden"), [("bfloat16", 512), ("bfloat16", 20), ("float8", 512), ("bytes", 512)])
def test_contiguous_rows(kind, hidden, session_seed):
    """Each landed row at its place, with its scales. In recv_x float8 rows lie apart, and rows that do not fill 128-byte lines."""

    def program(group):
        config = {
            "num_experts": 2 * EXPERTS_PER_RANK,
            "num_topk": TOPK,
            "hidden": hidden,
            "num_max_tokens_per_rank": MOST_TOKENS,
        }
        with moe_a2a.ExpertParallel(group, **config) as ep:
            generator = torch.Generator().manual_seed(session_seed + ep.rank)
            x = torch.randn(MOST_TOKENS, hidden, generator=generator).to(ep.device, torch.bfloat16)
            topk_idx = tokens_of(2, ep.rank, 0)[1].to(ep.device)
            if kind == "bytes":
                scales = torch.randint(120, 134, (MOST_TOKENS, hidden // 32), generator=generator).to(
                    ep.device, torch.uint8
                )
                handle = ep.dispatch(x.to(float8_dtype(ep.device)), topk_idx, x_scales=scales)
            else:
                handle = ep.dispatch(x, topk_idx, quantize="fp8" if kind == "float8" else None)
            rows, scales = handle.contiguous_rows()
            landed = handle.recv_rows.long()
            assert len(landed) > 0 and rows.is_contiguous() and rows.shape == handle.recv_x.shape
            assert torch.equal(rows[landed].float(), handle.recv_x[landed].float())
            assert (rows.data_ptr() == handle.recv_x.data_ptr()) == (kind == "bfloat16" and hidden == 512)
            assert (scales is None) == (kind == "bfloat16")
            if scales is not None:
                assert scales.is_contiguous() and torch.equal(scales[landed], handle.recv_x_scales[landed])
            handle.release()
            with pytest.raises(RuntimeError, match="got a handle that is closed"):
                handle.contiguous_rows()
            with pytest.raises(RuntimeError, match='layout="masked"; read expert_x'):
                ep.dispatch(x, topk_idx, layout="masked").contiguous_rows()

    on_device.run(2, program)
