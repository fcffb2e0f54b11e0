"""What the server of forks imports once, so that no rank has to: a rank's process then starts in milliseconds."""

import torch

from moe_a2a.leaderboard import rank_program  # noqa: F401
from moe_a2a.leaderboard.guards import CollectiveBytes

# PyTorch imports 800 modules when a dispatch mode sees its first operator.
with CollectiveBytes(world_size=1):
    torch.zeros(1)
