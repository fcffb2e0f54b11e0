"""Data parallelism that takes the experts of a MoELayer for replicas.

Unchecked, DistributedDataParallel overwrites every rank's experts with rank 0's, and fully_shard() and
FullyShardedDataParallel gather shards of different experts, all without an error.
"""

import node_groups
import pytest
import torch
import torch.distributed as dist
from ranks import run_processes
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import moe_a2a

pytestmark = pytest.mark.cpu

NUM_EXPERTS, K, H, INTER, T = 8, 2, 32, 16, 12

KINDS = pytest.mark.parametrize("kind", [moe_a2a.ExpertParallel, moe_a2a.TwoLevelExpertParallel])


class Model(torch.nn.Module):
    """A router, the same on every rank, and this rank's experts."""

    def __init__(self, ep, seed, **how):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.router = torch.nn.Linear(H, NUM_EXPERTS)
        torch.nn.init.normal_(self.router.weight, generator=generator)
        torch.nn.init.zeros_(self.router.bias)
        first, last = ep.rank * ep.num_local_experts, (ep.rank + 1) * ep.num_local_experts
        w_gate_up = torch.randn(NUM_EXPERTS, 2 * INTER, H, generator=generator)[first:last] / 8
        w_down = torch.randn(NUM_EXPERTS, H, INTER, generator=generator)[first:last] / 8
        self.layer = moe_a2a.MoELayer(ep, w_gate_up.requires_grad_(), w_down.requires_grad_(), **how)

    def forward(self, x):
        topk_weights, topk_idx = self.router(x).softmax(-1).topk(K)
        return self.layer(x, topk_idx, topk_weights)

    def names_of_experts(self):
        return [f"layer.{name}" for name, _ in self.layer.named_parameters()]


def make_ep(group, kind=moe_a2a.ExpertParallel):
    sizes = {"num_experts": NUM_EXPERTS, "num_topk": K, "hidden": H, "num_max_tokens_per_rank": T}
    groups = (group,) if kind is moe_a2a.ExpertParallel else node_groups.groups(dist.get_world_size(), 1)
    return kind(*groups, **sizes, dtype=torch.float32, device="cpu", timeout=20)


def rows(seed):
    return torch.randn(T, H, generator=torch.Generator().manual_seed(1000 * seed + dist.get_rank()))


def copies_of(parameters):
    return [p.detach().clone() for p in parameters]


def check_left_alone(ep, seed, wrap):
    """`wrap` leaves the experts of a model out: it computes what it did, and they keep their values."""
    model, x = Model(ep, seed), rows(seed)
    expected, before = model(x), copies_of(model.layer.parameters())
    out = wrap(model)(x)
    assert torch.equal(out, expected)
    out.sum().backward()
    assert all(map(torch.equal, before, copies_of(model.layer.parameters())))


def ddp_without_experts(model):
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, model.names_of_experts())
    return DistributedDataParallel(model)


def ddp_program(world, seed, kind):
    x = rows(seed)
    with make_ep(world, kind) as ep:
        model = DistributedDataParallel(Model(ep, seed))
        for mode in torch.no_grad(), torch.enable_grad():
            with (
                mode,
                pytest.raises(RuntimeError, match=rf"takes w_gate_up, w_down .* replicas on rank {ep.rank}.*to_ignore"),
            ):
                model(x)
        check_left_alone(ep, seed, ddp_without_experts)


@KINDS
def test_ddp_over_the_ranks_of_the_experts(kind, session_seed):
    run_processes(2, ddp_program, session_seed % 10_000, kind)


def fsdp_program(world, seed, kind):
    with make_ep(world, kind) as ep:
        for part in (lambda model: model), (lambda model: model.layer):
            with pytest.raises(ValueError, match=rf"w_gate_up would be sharded .* rank {ep.rank}.*ignored_params"):
                fully_shard(part(Model(ep, seed)))
        check_left_alone(ep, seed, lambda model: fully_shard(model, ignored_params=set(model.layer.parameters())))


@KINDS
def test_fsdp_over_the_ranks_of_the_experts(kind, session_seed):
    run_processes(2, fsdp_program, session_seed % 10_000, kind)


def fsdp1_program(world, seed, kind):
    how = {"device_id": torch.device("cpu")}
    with make_ep(world, kind) as ep:
        for strategy in ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD:  # which sums gradients
            for use_orig_params in False, True:
                with pytest.raises(
                    ValueError, match=rf"one parameter of w_gate_up .* rank {ep.rank}; pass ignored_states="
                ):
                    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params, **how}
                    FullyShardedDataParallel(Model(ep, seed), **options)

        def without_experts(model):
            return FullyShardedDataParallel(model, ignored_states=set(model.layer.parameters()), **how)

        check_left_alone(ep, seed, without_experts)


@KINDS
def test_fsdp1_over_the_ranks_of_the_experts(kind, session_seed):
    run_processes(2, fsdp1_program, session_seed % 10_000, kind)


def replicas_program(world, seed):
    """Two groups of experts, each rank with a replica in the other: there the experts are what both tools take them for."""
    rank, x = dist.get_rank(), rows(seed)
    experts = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    replicas = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    with make_ep(experts[rank // 2]) as ep:
        alone, replicated, sharded = (Model(ep, seed) for _ in range(3))
        expected = alone(x)
        expected.sum().backward()
        for parameter in alone.parameters():
            dist.all_reduce(parameter.grad, group=replicas[rank % 2])
            parameter.grad /= 2
        wrapped = DistributedDataParallel(replicated, process_group=replicas[rank % 2])
        fully_shard(sharded, mesh=DeviceMesh.from_group(replicas[rank % 2], "cpu"))
        for model in wrapped, sharded:
            out = model(x)
            assert torch.equal(out, expected)
            out.sum().backward()
            for of_model, of_alone in zip(model.parameters(), alone.parameters(), strict=True):
                grad = getattr(of_model.grad, "full_tensor", lambda grad=of_model.grad: grad)()
                torch.testing.assert_close(grad, of_alone.grad)


def test_replicas_of_the_experts_may_be_wrapped(session_seed):
    run_processes(4, replicas_program, session_seed % 10_000)
