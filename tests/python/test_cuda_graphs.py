"""dispatch and combine in a captured graph: each replay is a fresh call, and mixes with eager ones.

Replays follow each other without synchronisation; the device checks each (exact.py), and the total is read at the
end. A graph fixes the number of tokens; its routing is the contents of the captured tensors.
"""

import random
import time

import exact
import on_device
import pytest
import torch

import moe_a2a

pytestmark = [on_device.TESTS, on_device.gpu_only]

NUM_REPLAYS = 1_000
NUM_TOKENS = 64
CONFIG = {
    "num_topk": 4, "hidden": 520, "num_max_tokens_per_rank": 96, "dtype": torch.bfloat16, "timeout": 10,
}  # fmt: skip


def make_ep(group, **config):
    return moe_a2a.ExpertParallel(group, **{**CONFIG, "num_experts": 6 * group.num_ranks, **config})


def make_generator(ep, seed):
    """Ranks have different data."""
    return torch.Generator(ep.device).manual_seed(1000 * seed + ep.rank)


def check(ep, wrong):
    ep.check()
    assert wrong.item() == 0, f"rank {ep.rank}: {wrong.item()} wrong values"


def captured_tokens(ep, num_tokens, generator, idx_dtype=torch.int64):
    """A graph's tensors, and a function that fills them; the number of tokens is fixed."""
    tokens = exact.make_tokens(ep, num_tokens, generator, idx_dtype)
    return tokens, lambda: tokens.copy_(exact.make_tokens(ep, num_tokens, generator, idx_dtype))


@pytest.mark.parametrize("idx_dtype", [torch.int32, torch.int64])
def test_a_thousand_replays_with_eager_calls_between(idx_dtype, session_seed):
    def program(group):
        with make_ep(group) as ep:
            generator, order = make_generator(ep, session_seed), random.Random(session_seed)
            tokens, renew = captured_tokens(ep, NUM_TOKENS, generator, idx_dtype)
            positions = exact.positions_of(ep)
            wrong = torch.zeros((), dtype=torch.int64, device=ep.device)
            graph, combined = on_device.capture(lambda: exact.step(ep, tokens, positions))
            own = random.Random(f"{session_seed} {ep.rank}")  # ranks may have different numbers
            for _ in range(NUM_REPLAYS):
                renew()
                combined.fill_(torch.nan)
                graph.replay()
                exact.count_wrong(wrong, combined, tokens)
                if order.random() < 0.1:
                    eager = exact.make_tokens(ep, own.randint(0, ep.num_max_tokens_per_rank), generator)
                    exact.count_wrong(wrong, exact.step(ep, eager, positions), eager)
            check(ep, wrong)

    on_device.run(on_device.most_ranks(), program, timeout=120)


def test_a_wrong_row_is_seen(session_seed):
    """Negative control of the check."""

    def program(group):
        with make_ep(group) as ep:
            tokens, renew = captured_tokens(ep, NUM_TOKENS, make_generator(ep, session_seed))
            positions = exact.positions_of(ep)
            wrong = torch.zeros((), dtype=torch.int64, device=ep.device)
            graph, combined = on_device.capture(lambda: exact.step(ep, tokens, positions))
            for replay in range(20):
                renew()
                if replay == 10 and ep.rank == 0:
                    tokens.topk_idx[3] = 0
                    tokens.expected.copy_(exact.expected_of(tokens.x, tokens.topk_idx))
                    tokens.x[3] += 1
                graph.replay()
                exact.count_wrong(wrong, combined, tokens)
            ep.check()
            return wrong.item()

    num_ranks = on_device.most_ranks()
    assert on_device.run(num_ranks, program) == [CONFIG["hidden"]] + [0] * (num_ranks - 1)


def test_two_graphs_of_one_object_in_any_order(session_seed):
    def program(group):
        with make_ep(group) as ep:
            generator, order = make_generator(ep, session_seed), random.Random(session_seed)
            positions = exact.positions_of(ep)
            wrong = torch.zeros((), dtype=torch.int64, device=ep.device)
            graphs = []
            for num_tokens in (NUM_TOKENS, 7 + ep.rank):
                tokens, renew = captured_tokens(ep, num_tokens, generator)
                graphs.append(
                    (*on_device.capture(lambda tokens=tokens: exact.step(ep, tokens, positions)), tokens, renew)
                )
            for _ in range(200):
                graph, combined, tokens, renew = order.choice(graphs)
                renew()
                graph.replay()
                exact.count_wrong(wrong, combined, tokens)
            check(ep, wrong)

    on_device.run(on_device.most_ranks(), program)


def test_halves_with_matrix_products_between(session_seed):
    def program(group):
        with make_ep(group) as ep:
            tokens, renew = captured_tokens(ep, NUM_TOKENS, make_generator(ep, session_seed))
            positions = exact.positions_of(ep)
            wrong = torch.zeros((), dtype=torch.int64, device=ep.device)
            a = torch.randint(-2, 3, (256, 256), device=ep.device).float()
            products = [a.new_empty(256, 256) for _ in range(2)]

            def step():
                handle = ep.dispatch_send(tokens.x, tokens.topk_idx)
                torch.mm(a, a, out=products[0])
                ep.dispatch_recv(handle)
                y = exact.run_experts(ep, handle, positions)
                ep.combine_send(y, handle)
                torch.mm(a, a, out=products[1])
                return ep.combine_recv(handle)

            graph, combined = on_device.capture(step)
            expected = (a.cpu() @ a.cpu()).to(ep.device)
            for _ in range(200):
                renew()
                combined.fill_(torch.nan)
                for product in products:
                    product.zero_()
                graph.replay()
                exact.count_wrong(wrong, combined, tokens)
                wrong += sum((product != expected).sum() for product in products)
            check(ep, wrong)

    on_device.run(on_device.most_ranks(), program)


def test_layouts_and_quantised_rows_in_a_graph(session_seed):
    """The graph also gathers expert_major and masked rows; float8 rows have scales."""

    def program(group):
        with make_ep(group, hidden=256) as ep:
            generator = make_generator(ep, session_seed)
            wrong = torch.zeros((), dtype=torch.int64, device=ep.device)

            def step(tokens, **options):
                handle = ep.dispatch(tokens.x, tokens.topk_idx, **options)
                rows = handle.expert_x
                if handle.row_dtype.itemsize == 1:
                    rows = rows.float() * handle.expert_x_scales.repeat_interleave(128, dim=-1)
                return ep.combine(rows.to(ep.dtype), handle)

            def distinct(num_tokens):  # the masked layout has no room if a token names an expert twice
                scores = torch.rand(num_tokens, ep.num_experts, device=ep.device, generator=generator)
                return scores.topk(ep.num_topk).indices

            for options in ({"layout": "expert_major", "expert_alignment": 16}, {"layout": "masked"},
                            {"layout": "masked", "quantize": "fp8"}):  # fmt: skip
                tokens, _ = captured_tokens(ep, NUM_TOKENS, generator)
                tokens.topk_idx.copy_(distinct(NUM_TOKENS))
                graph, combined = on_device.capture(lambda tokens=tokens, options=options: step(tokens, **options))
                for _ in range(30):
                    tokens.x.random_(-1, 2, generator=generator).mul_(4)  # exact in float8 too
                    tokens.topk_idx.copy_(distinct(NUM_TOKENS))
                    tokens.expected.copy_(tokens.x * ep.num_topk)
                    combined.fill_(torch.nan)
                    graph.replay()
                    exact.count_wrong(wrong, combined, tokens)
            check(ep, wrong)

    on_device.run(on_device.most_ranks(), program)


def test_replay_while_its_buffer_is_in_use_ends_at_the_deadline(session_seed):
    """The host does not see a replay, so it cannot refuse it: the deadline ends the wait for the credit."""
    timeout = 1.5

    def program(group):
        ep = make_ep(group, num_buffers=1, timeout=timeout)
        generator = make_generator(ep, session_seed)
        tokens, _ = captured_tokens(ep, NUM_TOKENS, generator)
        positions = exact.positions_of(ep)
        graph, _ = on_device.capture(lambda: exact.step(ep, tokens, positions))
        graph.replay()
        ep.check()
        handle = ep.dispatch(tokens.x, tokens.topk_idx)
        ep.check()
        group.all_gather(None)
        start = time.monotonic()
        graph.replay()
        with pytest.raises(moe_a2a.PeerTimeoutError) as raised:
            ep.check()
        elapsed = time.monotonic() - start
        assert timeout - 0.2 < elapsed < timeout + 1, elapsed
        assert raised.value.phase == "credit" and raised.value.operation == "dispatch_send", raised.value
        assert handle.is_open
        with pytest.raises(RuntimeError):
            ep.combine(exact.run_experts(ep, handle, positions), handle)
        ep.close()

    on_device.run(on_device.most_ranks(), program, timeout=30)
