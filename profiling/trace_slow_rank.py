"""One slow rank: the last one enters every layer 50 ms late.

What to look for:
  - All other ranks wait in dispatch_recv, in a table_wait whose peer is the last rank.
  - Its own dispatch_send begins where their waits end: it is not slow inside the layer, it arrived late.
  - The critical path leads through "before the launch" of that rank: look at its work before the layer (its data,
    its garbage collector, another process on its GPU).
"""

import time

from layer import Layer, main

LATE_SECONDS = 0.05


def prepare(layer: Layer) -> None:
    if layer.ep.rank == layer.ep.num_ranks - 1:
        layer.before_dispatch = lambda: time.sleep(LATE_SECONDS)


if __name__ == "__main__":
    main(prepare, __doc__)
