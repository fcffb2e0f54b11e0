"""A hot expert: 8 of 10 tokens choose expert 0, which is on rank 0.

What to look for:
  - Rank 0 has most tiles, many of them of expert 0 ("balance" in the summary), and its combine_send begins last.
  - The other ranks wait in combine_recv, in partial_waits whose peer is 0; their arrows come from rank 0's last sums.
  - The summary names the expert. The remedy is outside this library: replicate the expert, or balance the router.
"""

import torch
from layer import Layer, main

HOT_EXPERT, SHARE = 0, 0.8


def prepare(layer: Layer) -> None:
    hot = torch.rand(len(layer.topk_idx), device=layer.ep.device) < SHARE
    already = (layer.topk_idx == HOT_EXPERT).any(dim=1)
    layer.topk_idx[hot & ~already, 0] = HOT_EXPERT


if __name__ == "__main__":
    main(prepare, __doc__)
