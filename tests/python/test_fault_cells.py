"""Some of the cells of fault_cells.py, different ones in every session. All of them: python tests/python/fault_cells.py"""

import fault_cells
import on_device
import pytest

pytestmark = pytest.mark.cpu

EVERY = 40


@on_device.cpu_only
def test_a_lost_rank_is_named(session_seed):
    assert fault_cells.main(["--every", str(EVERY), "--first", str(session_seed % EVERY)]) == 0
