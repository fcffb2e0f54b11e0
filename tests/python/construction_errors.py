"""What a constructor raises on a rank whose peer does not come."""

import time

import pytest
import ranks
from lost_ranks import TIMEOUT, VICTIM
from small_calls import CONFIG

import moe_a2a

SHORT = {**CONFIG, "timeout": TIMEOUT}


def timed_error(group, **config):
    start = time.monotonic()
    with pytest.raises(moe_a2a.PeerTimeoutError) as raised:
        moe_a2a.ExpertParallel(group, **{**SHORT, **config})
    error = raised.value
    return {
        "seconds": time.monotonic() - start,
        "peer": error.peer,
        "rank": error.rank,
        "operation": error.operation,
        "text": str(error),
    }


def check(report, rank, victim=VICTIM):
    assert report["seconds"] < TIMEOUT + ranks.slack(1), report
    assert (report["rank"], report["peer"], report["operation"]) == (rank, victim, "construct"), report
    assert f"rank {rank} " in report["text"] and f"rank {victim}" in report["text"], report
