"""The bare push of rows into other ranks' memory, `push_rows` of the extension: what the links can do. bench and leaderboard take
its fastest variant as the floor."""

from __future__ import annotations

import torch

WAYS = ("warp_sender", "warp_stores", "block_stores")
GPU_BLOCKS = (8, 24, 64)  # and one per multiprocessor


def ways(device: torch.device) -> list[tuple[str, int]]:
    """(way, blocks)"""
    if device.type != "cuda":
        return [(WAYS[0], 1)]
    most = torch.cuda.get_device_properties(device).multi_processor_count
    counts = [blocks for blocks in GPU_BLOCKS if blocks < most] + [most]
    return [(way, blocks) for way in WAYS for blocks in counts]
