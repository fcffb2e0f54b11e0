"""A communication hook for DistributedDataParallel: Collectives average the gradients, with a line codec if asked.

from moe_a2a import ddp

coll = moe_a2a.Collectives(group)
model = DistributedDataParallel(module)
model.register_comm_hook(ddp.GradientState(coll, codec="q4"), ddp.average_gradients)
"""

# No postponed annotations: DistributedDataParallel inspects those of its hooks.
import torch
import torch.distributed as dist

from moe_a2a import arguments, calls, codecs
from moe_a2a.collectives import Collectives, check_open_collectives, even_shares
from moe_a2a.groups import thread_group

ALONE_NBYTES = 32 << 20  # DDP's default bucket; its workspace takes four times as much


class GradientState:
    """Settings of average_gradients(), and what it keeps between steps. One for each model.

    Args:
        collectives: of the same ranks as DistributedDataParallel's process group.
        codec: how gradients travel, see Collectives.all_reduce(). None: as they are, rounded once.
        error_feedback: with a codec, adds the encoding error of a rank's own gradients to its gradients of the next step.
            Takes as much memory as the gradients. The error from encoding the average is not kept.
    """

    def __init__(self, collectives: Collectives, codec: str | None = None, *, error_feedback: bool = True):
        check_open_collectives(collectives)
        codecs.checked_index(collectives.rank, "codec", codec)
        arguments.checked_bool(collectives.rank, "error_feedback", error_feedback)
        self.collectives = collectives
        self.codec = codec
        self.error_feedback = error_feedback and codec is not None
        # By bucket: its parameters, by id, and what their gradients have lost.
        self._lost: dict[int, tuple[list[int], torch.Tensor]] = {}
        # An all-reduce over one rank is a round trip through the codec.
        self._alone = (
            Collectives(thread_group(1)[0], ALONE_NBYTES, device=collectives.device) if self.error_feedback else None
        )

    def close(self) -> None:
        """Frees the memory of this object. The Collectives stay open."""
        if self._alone is not None:
            self._alone.close()
        self._lost.clear()

    def add_what_was_lost(self, bucket: dist.GradBucket) -> None:
        """Adds the previous step's encoding error to a bucket's gradients, and keeps this step's."""
        if self._alone is None or self._alone.is_closed:
            raise RuntimeError("this GradientState is closed; make a new one")
        gradients, parameters = bucket.buffer(), [id(parameter) for parameter in bucket.parameters()]
        owners, lost = self._lost.get(bucket.index(), ([], gradients))
        if owners != parameters:  # DDP rebuilds its buckets after the first step
            lost = torch.zeros_like(gradients)
            self._lost[bucket.index()] = parameters, lost
        gradients += lost
        torch.sub(gradients, self._alone.all_reduce(gradients, codec=self.codec), out=lost)
        coll = self.collectives
        lost.split(even_shares(lost.numel(), coll.num_ranks))[coll.rank].zero_()  # this rank's own share stays exact
        lost.nan_to_num_(0, 0, 0)  # a step with infinities must not spoil later ones


def average_gradients(state: GradientState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook: averages a bucket's gradients over the ranks."""
    gradients = bucket.buffer()
    with calls.refused_if_failed(state.collectives):
        _check_gradients(state.collectives.rank, gradients)
        if state.error_feedback:
            state.add_what_was_lost(bucket)
    state.collectives.all_reduce(gradients, "avg", codec=state.codec, out=gradients)
    done: torch.futures.Future[torch.Tensor]
    done = torch.futures.Future() if gradients.is_cpu else torch.futures.Future(devices=[gradients.device])
    done.set_result(gradients)
    return done


def _check_gradients(rank: int, gradients: torch.Tensor) -> None:
    if gradients.layout != torch.strided:
        raise TypeError(f"the gradients are sparse on rank {rank}; make the embedding with sparse=False")
    if gradients.dtype not in arguments.ROW_DTYPES:
        raise TypeError(
            f"the gradients have dtype {gradients.dtype} on rank {rank}; make the parameters float32, float16 or bfloat16"
        )
