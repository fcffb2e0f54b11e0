"""Config: moe_a2a uses only its number of SMs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """num_sms: blocks of the kernels. The chunk sizes of DeepEP's queues are accepted and not used."""

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Grows with the row and the number of ranks, as callers expect. The first dispatch allocates what it needs."""
        return self.num_max_nvl_chunked_recv_tokens * num_ranks * hidden_bytes

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0: one node."""
        return 0
