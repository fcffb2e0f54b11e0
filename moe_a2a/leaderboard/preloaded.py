"""Modules that a rank's process needs before its first call. The fork server imports them once, so its forks start in
milliseconds."""

import torch

from moe_a2a.leaderboard.guards import CollectiveBytes

# PyTorch imports 800 modules when a dispatch mode sees its first operator.
with CollectiveBytes(world_size=1):
    torch.zeros(1)
