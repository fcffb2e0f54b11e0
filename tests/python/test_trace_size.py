"""A million records: merged and written, in both formats, in linear time and in less than a gigabyte."""

import dataclasses
import resource
import time

import numpy as np
import pytest
import ranks
import synthetic_trace as synthetic

from moe_a2a.tracing import export
from moe_a2a.tracing.merge import merge

pytestmark = [pytest.mark.cpu, pytest.mark.slow]

NUM_RECORDS = 1_000_000
FEWER = 10  # the baseline run has one record in this many
MAX_BYTES = 1 << 30
CALL_NS = 1_000_000  # from one repetition to the next


def repeated(rank, times):
    """Repeats the records of each segment."""
    words = rank.records.view(np.uint64)
    parts = []
    for segment in np.split(words, np.cumsum(rank.segment_written)[:-1]):
        again = np.tile(segment, (times, 1))
        ticks = again[:, 0] & np.uint64((1 << 48) - 1)
        later = ticks + np.repeat(np.arange(times, dtype=np.uint64) * np.uint64(CALL_NS), len(segment))
        again[:, 0] += (later & np.uint64((1 << 48) - 1)) - ticks
        parts.append(again)
    written = rank.segment_written * times
    return dataclasses.replace(rank, records=np.concatenate(parts).view(np.int64), segment_written=written)


def merge_and_write(group, folder, num_records):
    plan = synthetic.Plan(num_tokens=64, num_warps=8, slow_send=[1, 3, 1, 1])
    calls = synthetic.simulate(plan)
    times = -(-num_records // sum(len(rank.records) for rank in calls))
    start = time.process_time()  # not wall time: other work on this machine must not count
    timeline = merge([repeated(rank, times) for rank in calls], synthetic.configuration(plan), combine_row_bytes=128)
    seconds = {"merge": time.process_time() - start}
    for ending in (".pftrace", ".json.gz"):
        start = time.process_time()
        export.save(timeline, f"{folder}/trace{ending}")
        seconds[ending] = time.process_time() - start
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return len(timeline.slices), len(timeline.arrows), seconds, peak


def test_a_million_records(tmp_path):
    """How long it takes depends on the machine; time that grew with the square of the records would be 100 times longer here."""
    (few,) = ranks.run_processes(1, merge_and_write, str(tmp_path), NUM_RECORDS // FEWER, timeout=120)
    (all_of_them,) = ranks.run_processes(1, merge_and_write, str(tmp_path), NUM_RECORDS, timeout=240)
    for num_slices, num_arrows, seconds, peak in (few, all_of_them):
        print(f"{num_slices} slices, {num_arrows} arrows, {peak / 2**20:.0f} MiB, seconds: {seconds}")
    num_slices, num_arrows, seconds, peak = all_of_them
    assert num_slices >= NUM_RECORDS and num_arrows > 10_000
    assert peak < MAX_BYTES
    assert all(seconds[step] < 4 * FEWER * few[2][step] for step in seconds)
