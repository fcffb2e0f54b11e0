"""Calls that one rank refuses or fails to make, and what its peers must see. Small calls, by signals and by LL words."""

import time

import on_device
import pytest
from small_calls import CONFIG, good_call

import moe_a2a

REFUSED = moe_a2a.PeerRefusedError
REFUSER = 1
SALT = 3  # with inputs of this salt every rank has a route to every rank


@pytest.fixture(autouse=True, params=[0, CONFIG["num_max_tokens_per_rank"]], ids=["signals", "ll_words"])
def small_batches(request, monkeypatch):
    monkeypatch.setitem(CONFIG, "num_max_ll_tokens", request.param)


class Raises:
    """An argument that raises when it is inspected, as a failed allocation or a signal may."""

    def __init__(self, error):
        self.error = error

    def __index__(self):
        raise self.error


def run(program, num_ranks=3, **config):
    config = {**CONFIG, "timeout": 20, **config}

    def with_ep(group):
        with moe_a2a.ExpertParallel(group, **config) as ep:
            start = time.monotonic()
            program(ep, group)
            assert time.monotonic() - start < 17  # nobody waited until a deadline, even on a busy machine
            for salt in range(4):
                good_call(ep, salt)

    on_device.run(num_ranks, with_ep)
