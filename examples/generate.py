"""generate() of a transformers model whose experts are sharded over the ranks; each rank has its own prompt.

    torchrun --nproc-per-node 2 examples/generate.py

The model is a tiny Mixtral with random weights, so the text means nothing. The example shows that each rank gets the tokens
that the whole model in one process gives for its prompt, though prompts and texts differ in length.
"""

import copy

import torch
import torch.distributed as dist
from transformers import MixtralConfig, MixtralForCausalLM

from moe_a2a.devices import default_device
from moe_a2a.integrations.transformers import register, shard_experts

MAX_NEW_TOKENS = 24

dist.init_process_group()
rank, device = dist.get_rank(), default_device()
torch.manual_seed(0)  # every rank makes the same weights; a real model comes from from_pretrained()
config = MixtralConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=8,
    initializer_range=0.5,
    bos_token_id=None,
    eos_token_id=list(range(0, 128, 16)),  # ends texts early, at a different length on each rank
    pad_token_id=0,
)
model = MixtralForCausalLM(config).to(device).eval()
whole = copy.deepcopy(model)
whole.set_experts_implementation("eager")

register(None)
shard_experts(model, None)
model.set_experts_implementation("moe_a2a")

prompt = torch.randint(1, 128, (1, 5 + 3 * rank), device=device, generator=torch.Generator(device).manual_seed(rank))
options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": MAX_NEW_TOKENS}
# All ranks run the same layers: one whose text has ended continues with padding until the last one ends.
text = model.generate(prompt, synced_gpus=True, **options)

expected = whole.generate(prompt, **options)
ours, theirs = text[0, prompt.shape[1] :].tolist(), expected[0, prompt.shape[1] :].tolist()
assert ours[: len(theirs)] == theirs, (ours, theirs)
print(f"rank {rank}: {len(theirs)} tokens, the same as in one process: {theirs}", flush=True)
dist.barrier()
dist.destroy_process_group()
