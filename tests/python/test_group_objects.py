"""of_group(): one object of a kind per default process group, made by its first call and closed with the group."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_processes

import moe_a2a
from moe_a2a import group_objects

pytestmark = pytest.mark.cpu


def check_sum(max_nbytes):
    coll = moe_a2a.of_group(moe_a2a.Collectives, max_nbytes=max_nbytes)
    expected = torch.full((8,), float(dist.get_world_size()))
    assert torch.equal(coll.all_reduce(torch.ones(8)), expected)
    return coll


def objects_follow_the_group(_, folder):
    first = check_sum(4096)
    assert check_sum(4096) is first is group_objects.opened(moe_a2a.Collectives)
    larger = check_sum(8192)
    assert larger is not first and first.is_closed and group_objects.opened(moe_a2a.Collectives) is larger
    part = dist.new_group([0, 1])
    dist.destroy_process_group(part)  # ending another group does not end this one
    assert not larger.is_closed
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    assert larger.is_closed and group_objects.opened(moe_a2a.Collectives) is None
    with pytest.raises(RuntimeError, match="call torch.distributed.init_process_group"):
        check_sum(8192)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    again = check_sum(8192)
    again.close()
    assert check_sum(8192) is not again  # an object closed by hand is remade
    dist.barrier()


def test_objects_follow_the_group(tmp_path):
    run_processes(2, objects_follow_the_group, str(tmp_path))


def a_gpu_without_index(_):
    """Regression: device="cuda" was refused by torch.cuda.set_device(), which wants an index; the object itself takes it."""
    made = SimpleNamespace(is_closed=False, close=lambda: None)
    gpu = {"device_count": lambda: 1, "current_device": lambda: 0, "set_device": mock.Mock()}
    with mock.patch.multiple(torch.cuda, **gpu):
        assert moe_a2a.of_group(lambda group, device: made, device="cuda") is made
    gpu["set_device"].assert_called_once_with(torch.device("cuda", 0))


def test_a_gpu_without_index():
    run_processes(1, a_gpu_without_index)


def a_device_of_one_rank_that_does_not_exist(_):
    """Regression: that rank raised before it could tell the others, which waited until their deadline."""
    rank = dist.get_rank()
    device, error = ("cuda:99", ValueError) if rank == 0 else ("cpu", RuntimeError)
    with pytest.raises(error, match="cuda:99.*but PyTorch finds .* GPUs on rank 0"):
        moe_a2a.of_group(moe_a2a.Collectives, max_nbytes=4096, device=device)
    check_sum(4096)


def test_a_device_of_one_rank_that_does_not_exist():
    run_processes(2, a_device_of_one_rank_that_does_not_exist)
