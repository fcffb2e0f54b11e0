"""Makes the pictures of Perfetto in README and the docs. Each needs a trace, which the command before it writes:

MOE_A2A_DEVICE=cpu torchrun --nproc-per-node 4 profiling/trace_slow_rank.py --blocks 1 --output slow_rank.pftrace
python profiling/screenshots.py slow_rank slow_rank.pftrace docs/images
torchrun --nproc-per-node 4 profiling/trace_one_layer.py --tokens 128 --hidden 7168 --topk 8 --experts 256 --output layer.pftrace
python profiling/screenshots.py layer layer.pftrace docs/images
python -m moe_a2a bench micro_batches --blocks 16,32,24 --trace turns.json
python profiling/screenshots.py micro_batches turns.json docs/images
"""

from __future__ import annotations

import sys
from pathlib import Path

from perfetto_ui import opened

from moe_a2a.tracing.file_timeline import to_timeline
from moe_a2a.tracing.plot import save_plot
from moe_a2a.tracing.reading import read

# A row's arrow from rank 0, in a wait short enough to fit into the picture.
ARROW = """
select sink.id as id, sink.ts - trace_start() as begin, sink.ts + sink.dur - trace_start() as end
from flow join slice sink on slice_in = sink.id join slice source on slice_out = source.id
join track warp on source.track_id = warp.id join track rank on warp.parent_id = rank.id
where rank.name = 'rank 0' and sink.track_id != source.track_id and sink.dur between 500 and 20000 order by sink.ts limit 1
"""


KERNELS = (
    "select min(ts) - trace_start() as begin, max(ts + dur) - trace_start() as end from slice where category = 'kernel'"
)


def of_slow_rank(trace: str, images: Path) -> None:
    with opened(trace, height=1250) as ui:
        ui.run("ToggleLeftSidebar")
        ui.screenshot(images / "tracing_first_screen.png", height=450)
        ui.run("ExpandAllGroups")
        ui.screenshot(images / "tracing_overview.png")
        (arrow,) = ui.query(ARROW)
        ui.expand([name for name in ui.rows() if "%" not in name])  # the ranks' blocks, without the counters
        ui.select(arrow["id"])
        ui.show(arrow["begin"] - 60_000, arrow["end"] + 40_000)
        ui.screenshot(images / "tracing_arrow.png")
    save_plot(images / "tracing_plot.png", to_timeline(read(trace)))


def of_layer(trace: str, images: Path) -> None:
    with opened(trace, height=900) as ui:
        ui.run("ToggleLeftSidebar")
        ui.screenshot(images / "tracing_layer.png", height=580)


def of_micro_batches(trace: str, images: Path) -> None:
    with opened(trace, height=900) as ui:
        ui.run("ToggleLeftSidebar")
        ui.run("ExpandAllGroups")
        (kernels,) = ui.query(KERNELS)
        ui.show(int(kernels["begin"]), int(kernels["end"]))
        ui.screenshot(images / "micro_batches.png", height=430)


PICTURES = {"slow_rank": of_slow_rank, "layer": of_layer, "micro_batches": of_micro_batches}


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] not in PICTURES:
        sys.exit(f"usage: screenshots.py {'|'.join(PICTURES)} TRACE FOLDER\n\n{__doc__}")
    PICTURES[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
