"""DistributedDataParallel with few-bit gradients: the loss on gloo or NCCL, on the backend "moe_a2a", and with the
hook's codecs, each from the same start over the same batches.

torchrun --nproc-per-node 2 examples/ddp_codecs.py
torchrun --nproc-per-node 2 examples/ddp_codecs.py --json losses.json --plot losses.png     # needs matplotlib
"""

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import moe_a2a
from moe_a2a.ddp import GradientState, average_gradients

FEATURES, CLASSES, BATCH = 64, 16, 32
CODECS = {
    "hook, q8": ("q8", True),
    "hook, q4 + error feedback": ("q4", True),
    "hook, q4 alone": ("q4", False),
}


def model(seed: int, width: int, device: torch.device) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, CLASSES)
    ).to(device)


def train(num_steps: int, device: torch.device, process_group=None, state: GradientState | None = None) -> list[float]:
    """The loss of each step, averaged over the ranks. A larger random network supplies the targets."""
    teacher = model(1, 96, device)
    student = DistributedDataParallel(model(2, 128, device), process_group=process_group)
    if state is not None:
        student.register_comm_hook(state, average_gradients)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(100 + dist.get_rank())  # each rank has its own batches
    losses = torch.zeros(num_steps, device=device)
    for step in range(num_steps):
        x = torch.randn(BATCH, FEATURES, generator=generator).to(device)
        with torch.no_grad():
            labels = teacher(x).argmax(1)
        loss = nn.functional.cross_entropy(student(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[step] = loss.detach()
    dist.all_reduce(losses)
    return (losses / dist.get_world_size()).tolist()


def curves(num_steps: int, device: torch.device) -> dict[str, list[float]]:
    ours = dist.new_group(backend="moe_a2a")
    found = {
        "nccl" if device.type == "cuda" else "gloo": train(num_steps, device),
        'backend "moe_a2a"': train(num_steps, device, ours),
    }
    with moe_a2a.Collectives(device=device) as coll:
        for name, (codec, feedback) in CODECS.items():
            state = GradientState(coll, codec, error_feedback=feedback)
            found[name] = train(num_steps, device, state=state)
            state.close()
    dist.destroy_process_group(ours)
    return found


def mean_of_last(losses: list[float], count: int = 50) -> float:
    return sum(losses[-count:]) / len(losses[-count:])


def smooth(losses: list[float], weight: float = 0.95) -> list[float]:
    """A moving average: batches differ more than codecs do."""
    found = losses[:1]
    for loss in losses[1:]:
        found.append(weight * found[-1] + (1 - weight) * loss)
    return found


def plot(found: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(7, 6), sharex=True, layout="constrained")
    exact = next(iter(found.values()))
    for (name, losses), style in zip(found.items(), ["-", "--", "-", "-", ":"], strict=True):
        above.plot(smooth(losses), style, label=name)
        below.plot(smooth([a - b for a, b in zip(losses, exact, strict=True)]), style)
    above.set_ylabel("loss, moving average")
    above.legend()
    below.set_ylabel(f"difference from {next(iter(found))}")
    below.set_xlabel("step")
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150, help="training steps (default: 150)")
    parser.add_argument("--json", type=Path, help="write the losses here")
    parser.add_argument("--plot", type=Path, help="draw the loss curves here")
    options = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    found = curves(options.steps, device)
    exact, ours, *coded = found.values()
    assert max(abs(a - b) for a, b in zip(exact, ours, strict=True)) < 5e-3  # the order of addition, step after step
    assert all(mean_of_last(losses) < 1.1 * mean_of_last(exact) for losses in coded[:2])
    rank = dist.get_rank()
    print(f"rank {rank}: " + ", ".join(f"{name} {mean_of_last(losses):.4f}" for name, losses in found.items()))
    if rank == 0 and options.json:
        rounded = {name: [round(loss, 5) for loss in losses] for name, losses in found.items()}
        options.json.write_text(json.dumps({"ranks": dist.get_world_size(), "losses": rounded}) + "\n")
    if rank == 0 and options.plot:
        plot(found, options.plot)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
