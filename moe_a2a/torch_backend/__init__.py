"""A backend of torch.distributed: init_process_group("moe_a2a").

all_reduce, reduce_scatter(_tensor), all_gather(_into_tensor), their coalesced forms and barrier run on Collectives, for
tensors of float32, float16 and bfloat16 and the operators that Collectives has. Everything else (broadcast, send, recv,
all_to_all, other dtypes, other operators, on a GPU lists of tensors of different shapes) goes to gloo for CPU tensors and to NCCL
for CUDA tensors.

Where a call goes depends only on its inputs: on what all ranks agree on. A rank whose tensor is not contiguous copies it, and
one whose output does not fit its input refuses the call on every rank.
"""

from __future__ import annotations

from moe_a2a.torch_backend.call_options import OPS
from moe_a2a.torch_backend.options import Options
from moe_a2a.torch_backend.process_group import MoeA2aProcessGroup, register

__all__ = ["OPS", "MoeA2aProcessGroup", "Options", "register"]
