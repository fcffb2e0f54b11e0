"""The choices of all ranks' tokens, which a dispatch of packed rows gathers first: they say which rows will land here, so that
the host reads all it has to know at once, before any row is sent."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_a2a import calls
from moe_a2a.errors import CallMismatchError
from moe_a2a.expert_parallel import ExpertParallel
from moe_a2a.integrations.deep_ep.exchange import Exchange
from moe_a2a.integrations.deep_ep.kinds import Call, Kind


@dataclass
class Choices:
    """A row for each row of recv_x, [R * T, K]."""

    ids: Tensor  # int64: the local expert, -1 for one elsewhere
    is_mine: Tensor  # bool: whether it is an expert of this rank
    weights: Tensor  # float32; undefined where it is not
    headers: Tensor  # int64 [R]: see _header()


@dataclass
class Arriving:
    """What the host knows before the rows are sent."""

    num_rows: int
    counts: list[int]  # of each local expert


def agreed_choices(
    exchange: Exchange, kind: Kind, bound: int | None, topk_idx: Tensor, topk_weights: Tensor | None, call: Call
) -> tuple[ExpertParallel, Choices, Arriving]:
    """The ExpertParallel of this call on all ranks; made if there is none, or none large enough. bound: if all ranks know it.
    Raises on every rank if the ranks make different calls."""
    try:
        ep = exchange.newest_of(kind) if bound is None else exchange.find(kind, bound)
        if ep is None:
            most, _ = exchange.agree(len(topk_idx), call)
            ep = exchange.expert_parallel(kind, most if bound is None else bound)
        while True:
            choices = choices_of_all(exchange, ep, topk_idx, topk_weights, call)
            most, arriving = _read(exchange, ep, choices)
            if most <= ep.num_max_tokens_per_rank:
                return ep, choices, arriving
            ep = exchange.expert_parallel(kind, most)
    except CallMismatchError:
        exchange.agree(len(topk_idx), call)  # says in which argument they differ
        raise


def choices_of_all(
    exchange: Exchange, ep: ExpertParallel, topk_idx: Tensor, topk_weights: Tensor | None, call: Call
) -> Choices:
    """Each rank gives a row of int64 for each of T tokens: K ids, -1 where there is no token; the bits of K weights; a header."""
    num_topk, room = ep.num_topk, ep.num_max_tokens_per_rank
    num_words = num_topk + (num_topk + 1) // 2 + 1
    with calls.refused_if_failed(exchange.collectives):
        table = topk_idx.new_full((room, num_words), -1, dtype=torch.int64)
        table[:1, -1:] = _header(len(topk_idx), call)
        table[: len(topk_idx), :num_topk] = topk_idx[:room]  # of more than T tokens T: the call is repeated
        if topk_weights is not None:
            of_weights = table[: len(topk_idx), num_topk:-1].view(torch.float32)
            of_weights[:, :num_topk] = topk_weights[:room]
    tables = exchange.collectives.all_gather(table.view(torch.float32)).view(torch.int64)
    with exchange.dispatch_refused_if_failed(ep):
        local = tables[:, :num_topk] - ep.rank * ep.num_local_experts
        is_mine = local.clamp(0, ep.num_local_experts - 1) == local
        weights = tables[:, num_topk:-1].view(torch.float32)[:, :num_topk]
        return Choices(torch.where(is_mine, local, -1), is_mine, weights, tables[::room, -1])


def _header(num_tokens: int, call: Call) -> int:
    """A rank's number of tokens and a digest of its call."""
    return num_tokens << 32 | zlib.crc32(str(call.numbers()).encode())


def _read(exchange: Exchange, ep: ExpertParallel, choices: Choices) -> tuple[int, Arriving]:
    """(the most tokens of a rank, what arrives), read by the host."""
    counts = choices.ids.new_zeros(ep.num_local_experts + 1)
    counts.scatter_add_(0, (choices.ids + 1).view(-1), counts.new_ones(1).expand(choices.ids.numel()))
    num_rows = choices.is_mine.any(1).sum().view(1)
    read = torch.cat([choices.headers, num_rows, counts]).tolist()
    exchange.collectives._core.raise_reported()  # on a GPU a refused gather returns, too
    headers = read[: ep.num_ranks]
    if len({header & 0xFFFFFFFF for header in headers}) > 1:
        raise CallMismatchError("the ranks make different dispatches")
    rows, _, *per_expert = read[ep.num_ranks :]
    return max(header >> 32 for header in headers), Arriving(rows, per_expert)
