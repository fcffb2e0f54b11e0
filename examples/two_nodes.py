"""An MoE layer over the ranks of several machines: moe_a2a within each, gloo or NCCL between them. On machine i of 2:

torchrun --nnodes 2 --node-rank i --nproc-per-node 4 --master-addr ADDRESS --master-port 29500 examples/two_nodes.py
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import moe_a2a
from moe_a2a.devices import default_device

NUM_TOKENS, TOP_K, HIDDEN, INTERMEDIATE = 256, 4, 1024, 256

device = default_device()  # with GPUs: that of LOCAL_RANK, made the current one
dist.init_process_group()
num_local = int(os.environ["LOCAL_WORLD_SIZE"])
shape = dist.get_world_size() // num_local, num_local
mesh = init_device_mesh(device.type, shape, mesh_dim_names=("between", "local"))

with moe_a2a.TwoLevelExpertParallel(
    mesh["local"],
    mesh["between"],
    num_experts=8 * dist.get_world_size(),
    num_topk=TOP_K,
    hidden=HIDDEN,
    num_max_tokens_per_rank=NUM_TOKENS,
) as ep:
    generator = torch.Generator(ep.device).manual_seed(ep.rank)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=ep.device, generator=generator)

    layer = moe_a2a.MoELayer(
        ep,
        torch.nn.Parameter(random(ep.num_local_experts, 2 * INTERMEDIATE, HIDDEN) / HIDDEN**0.5),
        torch.nn.Parameter(random(ep.num_local_experts, HIDDEN, INTERMEDIATE) / INTERMEDIATE**0.5),
    )
    hidden_states = random(NUM_TOKENS, HIDDEN)
    topk_weights, topk_idx = random(NUM_TOKENS, ep.num_experts).float().softmax(dim=-1).topk(TOP_K)
    optimizer = torch.optim.SGD(layer.parameters(), lr=50.0)
    losses = []
    for _ in range(5):
        loss = (layer(hidden_states, topk_idx, topk_weights) - hidden_states).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses
    nodes = topk_idx // (ep.num_experts // ep.num_nodes)
    away = sum(int((nodes == node).any(1).sum()) for node in range(ep.num_nodes) if node != ep.node)
    print(
        f"rank {ep.rank} on {ep.device} of node {ep.node}: {away} rows leave the node in a dispatch, "
        f"loss {losses[0]:.3f} -> {losses[-1]:.3f}",
        flush=True,
    )
dist.destroy_process_group()
