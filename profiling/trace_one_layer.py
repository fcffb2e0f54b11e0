"""One layer with even routing: a healthy trace.

What to look for, from the top of a rank downwards:
  - dispatch_send and dispatch_recv (on a GPU: dispatch, in which some blocks send while others receive), then
    grouped_gemm twice, with a tile for each unit of work, then combine_send and combine_recv.
  - In dispatch_recv a short table_wait, then lists; most rows have landed by then and leave no row_wait.
  - On the CPU, ranks share the cores: a wait lasts until the other rank gets one, and the summary may blame a rank that
    merely waited for a core.
"""

from layer import Layer, main


def prepare(layer: Layer) -> None:
    pass


if __name__ == "__main__":
    main(prepare, __doc__)
