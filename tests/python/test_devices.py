"""Which GPU a rank takes by default, and that no two ranks take the same one. Needs no GPU: PyTorch's answers
are mocked."""

import threading
import types

import pytest
import ranks
import torch

import moe_a2a
from moe_a2a import devices

pytestmark = pytest.mark.cpu


@pytest.fixture
def machine(monkeypatch):
    """Four GPUs, the current one is number 0."""
    state = types.SimpleNamespace(current=0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: state.current)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: setattr(state, "current", index))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("MOE_A2A_DEVICE", "cuda")
    return state


@pytest.mark.parametrize(
    ("current", "local_rank", "taken"),
    [
        (0, None, 0),
        (0, "0", 0),
        (0, "3", 3),
        (2, "3", 2),  # the process has chosen
        (0, "4", 0),  # CUDA_VISIBLE_DEVICES shows each rank its own GPUs
        (0, "", 0),
    ],
)
def test_the_gpu_that_a_rank_takes(machine, monkeypatch, current, local_rank, taken):
    machine.current = current
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert devices.default_device() == torch.device("cuda", taken)
    assert devices.with_index(torch.device("cuda")) == torch.device("cuda", taken)
    assert machine.current == taken, "object collectives of NCCL run on the current GPU"


@pytest.mark.parametrize(("local_rank", "taken"), [("3", 3), ("4", 0), ("6", 2), ("", 0)])
def test_ranks_that_may_share_gpus_take_them_in_turn(machine, monkeypatch, local_rank, taken):
    monkeypatch.setenv("MOE_A2A_SHARE_GPUS", "1")
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert devices.default_device() == torch.device("cuda", taken)


def test_a_device_with_an_index_is_taken_as_it_is(machine, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert devices.with_index(torch.device("cuda:1")) == torch.device("cuda:1")
    assert devices.with_index(torch.device("cpu")) == torch.device("cpu")
    assert machine.current == 0


@pytest.mark.parametrize(("name", "num_gpus"), [("cuda", 0), ("cuda:0", 0), ("cuda:2", 2)])
def test_a_gpu_that_is_not_there_is_refused(monkeypatch, name, num_gpus):
    """Regression: an AssertionError of PyTorch."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    (group,) = moe_a2a.thread_group(1)
    words = f"device='{name}', but PyTorch finds {num_gpus} GPUs on rank 0; pass "
    with pytest.raises(ValueError, match=words):
        moe_a2a.Collectives(group, device=name)
    with pytest.raises(ValueError, match=words):
        moe_a2a.ExpertParallel(group, num_experts=6, num_topk=2, hidden=64, num_max_tokens_per_rank=4, device=name)
    monkeypatch.setenv("MOE_A2A_DEVICE", name)
    for call in (devices.default_device, devices.default_device_type):
        with pytest.raises(ValueError, match=f"MOE_A2A_DEVICE is '{name}', but PyTorch finds {num_gpus} GPUs; set it "):
            call()


def make(group):
    return moe_a2a.ExpertParallel(group, num_experts=6, num_topk=2, hidden=64, num_max_tokens_per_rank=4, device="cpu")


def test_two_ranks_on_one_gpu_are_refused_on_every_rank(monkeypatch):
    gpus = iter(["GPU-a", "GPU-b", "GPU-a"])
    monkeypatch.setattr(devices, "gpu_identity", lambda device: next(gpus))

    def program(group):
        with pytest.raises(
            ValueError,
            match=r"both on GPU GPU-a.*set_device\(int\(os\.environ\['LOCAL_RANK'\]\)\).*MOE_A2A_SHARE_GPUS=1",
        ) as e:
            make(group)
        return str(e.value)

    texts = ranks.run_threads(3, program)
    assert len(set(texts)) == 1


def test_ranks_on_the_cpu_share_it():
    ranks.run_threads(3, lambda group: make(group).close())


def test_a_rank_that_cannot_name_its_gpu_is_named_by_the_others(monkeypatch):
    """Regression: they waited until the deadline."""
    rank = threading.local()

    def identity(device):
        return devices.environment.is_on("MOE_A2A_SHARE_GPUS") if rank.number == 1 else None

    monkeypatch.setattr(devices, "gpu_identity", identity)
    monkeypatch.setenv("MOE_A2A_SHARE_GPUS", "2")

    def program(group):
        rank.number = group.rank
        with pytest.raises(ValueError if group.rank == 1 else RuntimeError, match="MOE_A2A_SHARE_GPUS is '2'; set it"):
            make(group)

    ranks.run_threads(3, program)


def test_a_gpu_is_told_by_its_own_name(monkeypatch):
    properties = types.SimpleNamespace(uuid="5c1e-77")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert devices.gpu_identity(torch.device("cuda:0")) == "5c1e-77"
    assert devices.gpu_identity(torch.device("cpu")) is None


def test_amd_gpus_without_a_serial_number_are_told_by_their_pci_addresses(monkeypatch):
    """ROCm gives every GPU without one, such as a virtual function, the same uuid, made of "XX"."""
    monkeypatch.setattr(torch.version, "hip", "7.0.51831-a3e329ad8")

    def identity(bus):
        properties = types.SimpleNamespace(
            uuid="58580000-0000-0000-0000-000000000000", pci_domain_id=0, pci_bus_id=bus, pci_device_id=0
        )
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        return devices.gpu_identity(torch.device("cuda:0"))

    assert identity(5) == identity(5) != identity(38)
    devices.check_one_rank_per_gpu([identity(5), identity(38)])
    with pytest.raises(ValueError, match="ranks 0 and 1 are both on GPU .*at PCI 00:05:00"):
        devices.check_one_rank_per_gpu([identity(5), identity(5)])


def test_processes_may_share_a_gpu_if_they_are_told_so_and_threads_may_not(monkeypatch):
    properties = types.SimpleNamespace(uuid="5c1e-77")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    def identity(process):
        monkeypatch.setattr(devices.os, "getpid", lambda: process)
        return devices.gpu_identity(torch.device("cuda:0"))

    for off in ("0", "", "false", "No", "off"):
        monkeypatch.setenv("MOE_A2A_SHARE_GPUS", off)
        assert identity(7) == identity(8)
    for on in ("1", "true", "yes", "ON"):
        monkeypatch.setenv("MOE_A2A_SHARE_GPUS", on)
        assert identity(7) == identity(7) != identity(8)
    with pytest.raises(ValueError, match="ranks 0 and 2 are both on GPU 5c1e-77 in process 7"):
        devices.check_one_rank_per_gpu([identity(7), identity(8), identity(7)])


def test_memory_is_kept_for_the_stream_of_its_gpu(monkeypatch):
    """PyTorch knows only the stream on which a tensor was made: without it, its memory is reused while another still reads."""
    kept = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    on_gpu = types.SimpleNamespace(is_cuda=True, device="cuda:1", record_stream=kept.append)
    devices.keep_for_current_stream(torch.zeros(1), on_gpu)
    assert kept == ["stream of cuda:1"]
