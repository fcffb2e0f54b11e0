"""QuickReduce's demo on moe_a2a.quickreduce: all-reduces ones in every profile.

torchrun --nproc-per-node 2 examples/quickreduce.py     # the handles go through a process group
python examples/quickreduce.py                          # ranks as Ray actors: pip install ray; the driver carries them
"""

import os

import torch

import moe_a2a.quickreduce as qr

NUM_RANKS = 2  # under Ray


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def all_reduce_demo() -> str:
    """Ones sum to the number of ranks: exactly, except in fp8, whose range is not a power of two."""
    tensor = torch.ones(1024, dtype=torch.float16, device=device())
    largest = {}
    for profile in qr.Profile:
        result = qr.allreduce(profile, tensor)
        largest[profile.name] = (result - qr.get_world_size()).abs().max().item()
    assert all(error <= (0.05 if name == "FP8" else 0) for name, error in largest.items()), largest
    return f"rank {qr.get_rank()}: {', '.join(largest)} gave {qr.get_world_size()}"


def under_torchrun() -> None:
    import torch.distributed as dist

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo")
    qr.init(dist.get_world_size(), dist.get_rank())
    handles: list = [None] * dist.get_world_size()
    dist.all_gather_object(handles, qr.get_comm_handle())
    qr.set_comm_handles(handles)
    print(all_reduce_demo())
    dist.barrier()  # nobody frees memory that another rank still reads
    qr.close()
    dist.destroy_process_group()


class Demo:
    """A rank; qr keeps one instance per process, and each actor has a process."""

    def __init__(self, rank: int):
        qr.init(NUM_RANKS, rank)

    def get_comm_handle(self) -> bytes:
        return qr.get_comm_handle()

    def set_comm_handles(self, handles: list[bytes]) -> None:
        qr.set_comm_handles(handles)

    def all_reduce_demo(self) -> str:
        return all_reduce_demo()


def under_ray() -> None:
    import ray

    ray.init(num_cpus=NUM_RANKS, include_dashboard=False)
    remote = ray.remote(num_gpus=1 if torch.cuda.is_available() else 0)(Demo)  # Ray shows each actor its own GPU
    actors = [remote.remote(rank) for rank in range(NUM_RANKS)]
    handles = ray.get([actor.get_comm_handle.remote() for actor in actors])
    ray.get([actor.set_comm_handles.remote(handles) for actor in actors])
    print("\n".join(ray.get([actor.all_reduce_demo.remote() for actor in actors])))
    ray.shutdown()


if __name__ == "__main__":
    under_torchrun() if "LOCAL_RANK" in os.environ else under_ray()
