"""shrink(): an ExpertParallel continues without the lost ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from moe_a2a import arguments
from moe_a2a.errors import PeerRefusedError, PeerTimeoutError, RoutingError
from moe_a2a.expert_parallel import ExpertParallel
from moe_a2a.groups import survivor_group
from moe_a2a.groups.survivor_group import SurvivorGroup, expert_map, survivors

log = logging.getLogger("moe_a2a")


def shrink(ep: ExpertParallel, *, lost: Iterable[int] = (), timeout: float | None = None) -> ExpertParallel:
    """Closes `ep` and returns an ExpertParallel of the surviving ranks; each keeps its experts.

        try:
            out = layer(ep, x, topk_idx)
        except moe_a2a.PeerTimeoutError as error:
            ep = moe_a2a.shrink(ep, lost=[error.peer])
            out = layer(ep, x, ep.expert_map[topk_idx])

    Every rank that is alive calls it; see survivors(), which finds them. If one dies before the new object is made, the
    others agree again. `ep.group.ranks` and `ep.group.lost` say which ranks of the original group are left and
    which are lost. `ep.expert_map` maps the expert ids of the original object to the new ones, also after several faults.

    `ep` may already be closed. It must have been made on a group, not on a Communicator, which may have other clients.

    Args:
        lost, timeout: see survivors(); the default timeout is that of `ep`.

    Raises: as survivors() and the constructor. `ep` is closed unless an argument was wrong, and all ranks may call again.
    """
    if not isinstance(ep, ExpertParallel):
        raise TypeError(
            f"ep is a {type(ep).__name__}; pass an ExpertParallel, or call survivors() and make the object on it"
        )
    if not ep._owns_comm:
        raise RuntimeError(
            f"this ExpertParallel is on a Communicator, which other objects may share (rank {ep.rank}); make "
            "Communicator(survivors(communicator)), new objects on it, and the map of experts with moe_a2a.expert_map()"
        )
    survivor_group.check_can_agree(ep.group)
    suspects = sorted(survivor_group.checked_lost(ep.group, lost))
    timeout = arguments.checked_timeout(ep.rank, ep.timeout if timeout is None else timeout)
    try:
        ep.close()  # first: the memory of both may not fit
    except (RoutingError, PeerTimeoutError, PeerRefusedError) as error:  # what no call has raised yet
        log.warning("rank %d: closing the ExpertParallel that lost a rank: %s", ep.rank, error)
    made = _made_again(ep, suspects, timeout)
    before = ep.group.ranks if isinstance(ep.group, SurvivorGroup) else range(ep.num_ranks)
    kept = [before.index(rank) for rank in made.group.ranks]
    step = expert_map(kept, num_ranks=ep.num_ranks, num_experts=ep.num_experts, device=ep.device)
    made.expert_map = step if ep.expert_map is None else step[ep.expert_map]
    log.warning(
        "rank %d goes on as rank %d of %d; ranks %s are lost, with %d of %d experts",
        made.group.ranks[made.rank],
        made.rank,
        made.num_ranks,
        list(made.group.lost),
        int((made.expert_map[:-1] < 0).sum()),
        len(made.expert_map) - 1,
    )
    return made


def _made_again(ep: ExpertParallel, lost: list[int], timeout: float) -> ExpertParallel:
    group = ep.group
    for attempts_left in reversed(range(ep.num_ranks)):
        group = survivors(group, lost=lost, timeout=timeout)
        try:
            return ExpertParallel(
                group,
                num_experts=ep.num_local_experts * group.num_ranks,
                num_topk=ep.num_topk,
                hidden=ep.hidden,
                num_max_tokens_per_rank=ep.num_max_tokens_per_rank,
                dtype=ep.dtype,
                device=ep.device,
                num_buffers=ep.num_buffers,
                timeout=ep.timeout,
                num_blocks=ep.num_blocks,
                num_max_ll_tokens=ep.num_max_ll_tokens,
                launch_table=ep._launch_table,
            )
        except PeerTimeoutError as error:  # another rank has died since
            if attempts_left == 0:
                raise
            lost = [error.peer]
    raise AssertionError("the last attempt returns or raises")
