"""Ranks as Ray actors, without a process group: the driver carries the handles from rank to rank.

pip install ray
python examples/ray_actors.py
"""

import ray
import torch

import moe_a2a

NUM_RANKS, NUM_EXPERTS, TOP_K, HIDDEN, NUM_TOKENS = 2, 8, 2, 256, 32


@ray.remote(num_gpus=1 if torch.cuda.is_available() else 0)  # Ray shows each actor its own GPU
class Rank:
    def __init__(self, rank: int):
        self.ep = moe_a2a.ExpertParallel(
            moe_a2a.HandleExchange(rank, NUM_RANKS),
            num_experts=NUM_EXPERTS,
            num_topk=TOP_K,
            hidden=HIDDEN,
            num_max_tokens_per_rank=NUM_TOKENS,
            dtype=torch.float32,
        )

    def handle(self) -> bytes:
        return self.ep.get_comm_handle()

    def connect(self, handles: list[bytes]) -> None:
        self.ep.set_comm_handles(handles)

    def run(self) -> float:
        """The experts return their input and the weights sum to one, so the layer returns its input."""
        generator = torch.Generator(self.ep.device).manual_seed(self.ep.rank)
        x = torch.randn(NUM_TOKENS, HIDDEN, device=self.ep.device, generator=generator)
        topk_idx = torch.rand(NUM_TOKENS, NUM_EXPERTS, device=self.ep.device, generator=generator).topk(TOP_K).indices
        topk_weights = torch.full((NUM_TOKENS, TOP_K), 1 / TOP_K, device=self.ep.device)
        handle = self.ep.dispatch(x, topk_idx, topk_weights)
        y = handle.recv_x[handle.expert_row_index[: handle.num_routes]]
        return (self.ep.combine(y, handle) - x).abs().max().item()


if __name__ == "__main__":
    ray.init(num_cpus=NUM_RANKS, include_dashboard=False)
    actors = [Rank.remote(rank) for rank in range(NUM_RANKS)]
    handles = ray.get([actor.handle.remote() for actor in actors])
    ray.get([actor.connect.remote(handles) for actor in actors])
    differences = ray.get([actor.run.remote() for actor in actors])
    assert max(differences) < 1e-5, differences
    print(f"{NUM_RANKS} actors, largest difference {max(differences):.1e}")
    ray.shutdown()
