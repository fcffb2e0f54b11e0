"""One slow rank: the last one comes 50 ms late to every layer.

What to look for:
  - All other ranks stand in dispatch_recv, in a table_wait whose peer is the last rank.
  - Its own dispatch_send begins where their waits end: it is not slow inside the layer, it came late.
  - The critical path goes through "before the launch" of that rank: look at what it does before the layer (its data,
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
