"""A two-layer model that each rank trains on its own data."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist


def train(
    wrap: Callable[[torch.nn.Module], torch.nn.Module], num_steps: int, device: str = "cpu"
) -> tuple[list[float], torch.nn.Module]:
    """The loss of each step, and the trained module. wrap: DistributedDataParallel, for example."""
    torch.manual_seed(5)
    module = torch.nn.Sequential(torch.nn.Linear(40, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10)).to(device)
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(128, 40, generator=generator).to(device)
    y = x[:, :10] + x[:, 10:20]
    model = wrap(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, module
