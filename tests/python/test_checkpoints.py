"""A MoELayer's weights in torch.distributed.checkpoint, as docs/training.md tells the reader to save and load them, and in files
of one rank."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_processes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import moe_a2a

pytestmark = pytest.mark.cpu

NUM_EXPERTS, HIDDEN, INTERMEDIATE = 8, 32, 16


def all_weights(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = (NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN), (NUM_EXPERTS, HIDDEN, INTERMEDIATE)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def layer_of_rank(ep, weights):
    first = ep.rank * ep.num_local_experts
    return moe_a2a.MoELayer(ep, *(w[first : first + ep.num_local_experts].clone() for w in weights))


def checkpoint_program(world, folder, seed, is_saved):
    sizes = {"num_experts": NUM_EXPERTS, "num_topk": 2, "hidden": HIDDEN, "num_max_tokens_per_rank": 4}
    with moe_a2a.ExpertParallel(world, **sizes, dtype=torch.float32, device="cpu") as ep:
        weights = all_weights(seed)
        layer = layer_of_rank(ep, weights if is_saved else [torch.zeros_like(w) for w in weights])
        mesh = init_device_mesh("cpu", (ep.num_ranks,))
        whole = {name: DTensor.from_local(w, mesh, [Shard(0)]) for name, w in layer.state_dict().items()}
        dcp.save(whole, checkpoint_id=folder) if is_saved else dcp.load(whole, checkpoint_id=folder)
        expected = layer_of_rank(ep, weights).state_dict()
        assert all(torch.equal(w, expected[name]) for name, w in layer.state_dict().items())
        dist.barrier()


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_experts_are_saved_on_two_ranks_and_loaded_on_others(num_ranks, tmp_path, session_seed):
    run_processes(2, checkpoint_program, str(tmp_path), session_seed, True)
    run_processes(num_ranks, checkpoint_program, str(tmp_path), session_seed, False)


def one_file_program(world, folder, seed):
    """Unchecked, every rank loads the experts of the rank that wrote the file, without an error."""
    sizes = {"num_experts": NUM_EXPERTS, "num_topk": 2, "hidden": HIDDEN, "num_max_tokens_per_rank": 4}
    with moe_a2a.ExpertParallel(world, **sizes, dtype=torch.float32, device="cpu") as ep:
        model = torch.nn.Sequential(layer_of_rank(ep, all_weights(seed)))
        before = {name: w.clone() for name, w in model.state_dict().items()}
        torch.save(model.state_dict(), f"{folder}/{ep.rank}.pt")
        dist.barrier()
        for writer in range(ep.num_ranks):
            saved = torch.load(f"{folder}/{writer}.pt", weights_only=True)
            for assign in (False, True):
                if writer == ep.rank:
                    model.load_state_dict(saved, assign=assign)
                    continue
                words = (
                    f"0.w_gate_up, 0.w_down: the experts of rank {writer} of {ep.num_ranks}, and this is rank {ep.rank}"
                )
                with pytest.raises(RuntimeError, match=words):
                    model.load_state_dict(saved, assign=assign)
                assert all(torch.equal(w, before[name]) for name, w in model.state_dict().items())
        model.load_state_dict(dict(saved))  # without where they come from
        dist.barrier()


def test_a_file_of_one_rank_is_not_loaded_by_the_others(tmp_path, session_seed):
    run_processes(2, one_file_program, str(tmp_path), session_seed)
