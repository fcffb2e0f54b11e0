"""A communication hook for DistributedDataParallel: gradients are averaged by Collectives, with a line codec if asked.

coll = moe_a2a.Collectives(group)
model = DistributedDataParallel(module)
model.register_comm_hook(moe_a2a.ddp.GradientState(coll, codec="q4"), moe_a2a.ddp.average_gradients)
"""

# No postponed annotations: DistributedDataParallel looks at those of its hooks.
import torch
import torch.distributed as dist

from moe_a2a.collectives import SHARE_UNIT, Collectives
from moe_a2a.groups import thread_group


class GradientState:
    """How average_gradients() does it, and what it keeps between steps.

    Args:
        collectives: of the same ranks as the process group of DistributedDataParallel.
        codec: how gradients travel, see Collectives.all_reduce(). None: as they are, and rounded once.
        error_feedback: with a codec, what the encoding of a rank's own gradients loses is added to its gradients of the
            next step. Takes as much memory as the gradients. What is lost when the average is encoded is not kept.
    """

    def __init__(self, collectives: Collectives, codec: str | None = None, *, error_feedback: bool = True):
        self.collectives = collectives
        self.codec = codec
        self.error_feedback = error_feedback and codec is not None
        self._lost: dict[int, torch.Tensor] = {}  # of each bucket
        # An all-reduce of one rank encodes and decodes.
        self._alone = Collectives(thread_group(1)[0], device=collectives.device) if self.error_feedback else None

    def close(self) -> None:
        """Gives its own memory back. The Collectives stay open."""
        if self._alone is not None:
            self._alone.close()
        self._lost.clear()

    def add_what_was_lost(self, index: int, gradients: torch.Tensor) -> None:
        """Adds to the gradients of a bucket what the step before has lost of them, and keeps what this one will."""
        lost = self._lost.get(index)
        if lost is None or lost.shape != gradients.shape or lost.dtype != gradients.dtype:  # DDP rebuilds its buckets
            lost = self._lost[index] = torch.zeros_like(gradients)
        gradients += lost
        assert self._alone is not None
        torch.sub(gradients, self._alone.all_reduce(gradients, codec=self.codec), out=lost)
        lost[self._own_share(gradients.numel())] = 0  # stays exact
        lost.nan_to_num_(0, 0, 0)  # a step with infinities does not spoil the ones after it

    def _own_share(self, count: int) -> slice:
        coll = self.collectives
        share = -(-count // (coll.num_ranks * SHARE_UNIT)) * SHARE_UNIT
        return slice(coll.rank * share, (coll.rank + 1) * share)


def average_gradients(state: GradientState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook: the gradients of a bucket, averaged over the ranks."""
    gradients = bucket.buffer()
    if state.error_feedback:
        state.add_what_was_lost(bucket.index(), gradients)
    state.collectives.all_reduce(gradients, "avg", codec=state.codec, out=gradients)
    done: torch.futures.Future[torch.Tensor]
    done = torch.futures.Future() if gradients.is_cpu else torch.futures.Future(devices=[gradients.device])
    done.set_result(gradients)
    return done
