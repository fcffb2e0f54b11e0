"""Random calls, good and hostile, on all ranks in step: what each may raise, what it must return, and who learns of it.

The ranks draw the same plan from the same seed. In each step all ranks make the same call, and the ranks that the plan names
make it wrongly: with tensors, handles and scalars that no call should accept. The plan knows what every rank must observe:

    dispatch    the wrong ranks raise their own error, the others PeerRefusedError; nobody has a handle
    combine     the same, but a rank that needs no sum from a wrong one ends normally; then all retry, and every value is
                compared
    release     by some while the others combine: PeerRefusedError, and the handle is closed on all

A rank that hits a deadline, a value that differs in one bit, or a handle open on one rank and closed on another fails the test
with the seed and the step.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import on_device
import torch
from refused_calls import REFUSED, Raises
from torch._subclasses.fake_tensor import FakeTensorMode

import moe_a2a
from moe_a2a import reference

HIDDEN, TOKENS, TOPK, EXPERTS_PER_RANK = 48, 6, 3, 4
OWN_ERRORS = (ValueError, TypeError, RuntimeError, MemoryError, KeyboardInterrupt)
ENDINGS = {"combine": 10, "wrong combine": 6, "release": 2, "some release": 2}


class Subclass(torch.Tensor):
    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: torch.Tensor):
        pass

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("called")


def freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


# Derived from a correct tensor; only for tensors with elements.
TENSORS = {
    "fake": lambda t: FakeTensorMode().from_tensor(t),
    "subclass": Subclass,
    "freed": freed,
    "sparse": lambda t: t.to_sparse(),
    "nested": lambda t: torch.nested.nested_tensor(list(t)),
    "meta": lambda t: t.to("meta"),
    "float64": lambda t: t.double(),
    "int16": lambda t: t.short(),
    "bool": lambda t: t.bool(),
    "wider": lambda t: torch.cat([t, t], 1),
    "longer": lambda t: torch.cat([t, t]),
    "three dimensions": lambda t: t[None],
    "one dimension": lambda t: t.flatten(),
    "transposed": lambda t: t.t(),
    "list": lambda t: t.tolist(),
    "number": lambda t: 7,
    "text": lambda t: "tensor",
}
SCALARS: dict[str, list[Any]] = {
    "num_blocks": [-1, None, True, 1.5, "x", 2**40, Raises(MemoryError("none")), Raises(KeyboardInterrupt())],
    "layout": ["sorted", 3, "é" * 700, b"rows"],
    "expert_alignment": [0, -5, 10**6, "8", 1.0, True],
    "quantize": ["int4", 3, True],
    "x_scales": [3, "x"],
    "handle": [5, "x", True],
    "unknown": [1],
}
OF_COMBINE: dict[str, list[Any]] = {
    "num_blocks": SCALARS["num_blocks"],
    "presummed": [None, 1, "x"],
    "out": [3, torch.zeros(1, 1), torch.zeros(3, HIDDEN, dtype=torch.float64)],
    "handle": [5, None, "closed"],
}


@dataclass
class Open:
    """A handle, its inputs on all ranks, and how often a rank without a handle may have refused its combine."""

    handle: Any
    inputs: list[tuple[torch.Tensor, ...]]
    presummed: bool
    refusals_left: int = 0
    done: bool = False


@dataclass
class Fuzz:
    ep: Any
    group: Any
    seed: int
    step: int = 0
    open: list[Open] = field(default_factory=list)
    closed: Any = None

    def __post_init__(self) -> None:
        self.plan = random.Random(self.seed)  # the same on every rank
        self.own = random.Random(1000 * self.seed + self.ep.rank)

    def run(self, num_steps: int) -> None:
        for self.step in range(num_steps):
            try:
                self.make_step()
            except BaseException as error:
                raise AssertionError(f"seed {self.seed}, step {self.step}, rank {self.ep.rank}: {error!r}") from error
        while self.open:
            self.combine(self.open.pop(), [])

    def make_step(self) -> None:
        assert (
            self.group.all_gather(sum(entry.handle.is_open for entry in self.open))
            == [len(self.open)] * self.ep.num_ranks
        )
        full = len(self.open) == self.ep.num_buffers
        if full and self.plan.random() < 0.2:
            return self.dispatch_once_too_often() if self.plan.random() < 0.5 else self.dispatch_without_room()
        if not self.open or (not full and self.plan.random() < 0.5):
            return self.wrong_dispatch() if self.plan.random() < 0.5 else self.dispatch()
        entry = self.open.pop(self.plan.randrange(len(self.open)))
        ending = self.plan.choices(list(ENDINGS), list(ENDINGS.values()))[0]
        some = self.some_ranks()
        if ending == "release":
            entry.handle.release()
        elif ending == "some release":
            self.release_on(entry, some)
        else:
            self.combine(entry, some if ending == "wrong combine" else [])
        assert not entry.handle.is_open
        self.closed = entry.handle

    def some_ranks(self) -> list[int]:
        ranks = list(range(self.ep.num_ranks))
        return self.plan.sample(ranks, self.plan.randint(1, len(ranks)))

    # ---- dispatch

    def inputs(self) -> list[tuple[torch.Tensor, ...]]:
        generator = torch.Generator().manual_seed(self.plan.getrandbits(40))
        return [self.inputs_of_rank(generator, self.plan.randint(0, TOKENS)) for _ in range(self.ep.num_ranks)]

    def inputs_of_rank(self, generator: torch.Generator, num_tokens: int) -> tuple[torch.Tensor, ...]:
        x = torch.randn(num_tokens, HIDDEN, generator=generator)
        scores = torch.rand(num_tokens, self.ep.num_experts, generator=generator)
        topk_idx = scores.topk(TOPK).indices  # distinct: "masked" has room
        topk_idx[torch.rand(topk_idx.shape, generator=generator) < 0.2] = -1
        return x, topk_idx, torch.rand(num_tokens, TOPK, generator=generator)

    def mine(self, inputs: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
        return [tensor.to(self.ep.device) for tensor in inputs[self.ep.rank]]

    def dispatch(self) -> None:
        inputs, layout, halves = self.inputs(), self.plan.choice(["rows", "masked", "expert_major"]), self.plan.random()
        blocks = self.plan.choice([0, 0, 0, 1, 3])
        if halves < 0.3:
            handle = self.ep.dispatch_send(*self.mine(inputs), num_blocks=blocks)
            self.ep.dispatch_recv(handle, layout=layout, num_blocks=blocks)
        else:
            handle = self.ep.dispatch(*self.mine(inputs), layout=layout, num_blocks=blocks)
        self.open.append(Open(handle, inputs, presummed=self.plan.random() < 0.2))

    def wrong_dispatch(self) -> None:
        inputs, some, halves = self.inputs(), self.some_ranks(), self.plan.random() < 0.3
        call = self.ep.dispatch_send if halves else self.ep.dispatch
        if self.ep.rank in some:
            self.must_raise(call, **self.wrong_arguments(*self.mine(inputs), halves))
            return
        try:
            if halves:
                self.ep.dispatch_recv(self.ep.dispatch_send(*self.mine(inputs)))
            else:
                self.ep.dispatch(*self.mine(inputs))
            on_device.settle(self.ep)
        except REFUSED as error:
            assert error.peer in some, error
            return
        raise AssertionError(f"a dispatch that {some} did not make has returned")

    def wrong_arguments(self, x: torch.Tensor, topk_idx: torch.Tensor, weights: torch.Tensor, halves: bool) -> Any:
        arguments = {"x": x, "topk_idx": topk_idx, "topk_weights": weights}
        names = [name for name in SCALARS if not (halves and name in ("layout", "expert_alignment"))]
        if len(x) and self.own.random() < 0.6:
            name = self.own.choice(list(arguments))
            return {**arguments, name: TENSORS[self.own.choice(list(TENSORS))](arguments[name])}
        name = self.own.choice(names)
        return {**arguments, name: self.own.choice(SCALARS[name])}

    def dispatch_once_too_often(self) -> None:
        self.must_raise(self.ep.dispatch, *self.mine(self.inputs()))

    def dispatch_without_room(self) -> None:
        """Some ranks still hold what the others have released, so they have no buffer when those dispatch."""
        entry, some = self.open.pop(self.plan.randrange(len(self.open))), self.some_ranks()
        self.closed = entry.handle
        if self.ep.rank not in some:
            entry.handle.release()
        for _ in range(self.plan.randint(1, 3)):
            inputs = self.mine(self.inputs())
            if self.ep.rank in some:
                self.must_raise(self.ep.dispatch, *inputs)
                continue
            try:
                on_device.dispatch(self.ep, *inputs)
            except REFUSED as error:
                assert error.peer in some, error
                continue
            raise AssertionError(f"a dispatch for which {some} had no buffer has returned")
        entry.handle.release()

    # ---- combine

    def combine(self, entry: Open, wrong: list[int]) -> None:
        y, expected = self.experts(entry), self.expected(entry)
        halves = self.plan.random() < 0.3
        self.write_to_a_view(entry)
        for refused in (entry, *self.open):  # a wrong handle refuses all open ones
            refused.refusals_left += len(wrong)
        if wrong and self.ep.rank in wrong:
            self.wrong_combine(entry, y)
        elif wrong:
            self.refused_combine(entry, y, expected, wrong)
        if wrong:
            self.group.all_gather(None)  # a wrong rank must not retry before the others have observed the refusal
        while not entry.done:
            try:
                out = self.combined(entry, y, halves)
            except REFUSED:
                assert entry.refusals_left > 0
                entry.refusals_left -= 1
                continue
            assert torch.equal(out, expected), "a combined value differs"
            entry.done = True
        self.group.all_gather(None)

    def combined(self, entry: Open, y: torch.Tensor, halves: bool) -> torch.Tensor:
        if halves and not entry.presummed and not on_device.IS_GPU:
            self.ep.combine_send(y, entry.handle)
            return self.ep.combine_recv(entry.handle)
        return on_device.combine(self.ep, y, entry.handle, presummed=entry.presummed)

    def wrong_combine(self, entry: Open, y: torch.Tensor) -> None:
        if self.own.random() < 0.4 and len(y):
            kind = self.own.choice([kind for kind in TENSORS if kind not in ("longer", "transposed")])
            self.must_raise(self.ep.combine, TENSORS[kind](y), entry.handle, presummed=entry.presummed)
            return
        name = self.own.choice(list(OF_COMBINE))
        value = self.own.choice(OF_COMBINE[name])
        if name == "handle" and value == "closed":
            value = self.closed
        self.must_raise(self.ep.combine, **{"y": y, "handle": entry.handle, name: value})

    def refused_combine(self, entry: Open, y: torch.Tensor, expected: torch.Tensor, wrong: list[int]) -> None:
        try:
            out = on_device.combine(self.ep, y, entry.handle, presummed=entry.presummed)
        except REFUSED as error:
            assert error.peer in wrong or entry.refusals_left > 0, error
            return
        topk_idx = entry.inputs[self.ep.rank][1]
        owners = set((topk_idx[topk_idx >= 0] // EXPERTS_PER_RANK).tolist())
        assert not owners & set(wrong), f"a combine that needs {owners & set(wrong)} has returned"
        assert torch.equal(out, expected), "a combined value differs"
        entry.done = True

    def release_on(self, entry: Open, some: list[int]) -> None:
        if self.ep.rank in some:
            entry.handle.release()
        else:
            self.refused_combine(entry, self.experts(entry), self.expected(entry), some)
        self.group.all_gather(None)
        entry.handle.release()  # on a rank that another one has refused before

    def must_raise(self, call: Any, *args: Any, **kwargs: Any) -> None:
        try:
            call(*args, **kwargs)
        except OWN_ERRORS as error:
            assert not isinstance(error, (moe_a2a.PeerTimeoutError, REFUSED)), error
            return
        raise AssertionError(f"{call.__name__} took {args} {kwargs}")

    def experts(self, entry: Open) -> torch.Tensor:
        """Doubles the rows; NaN wherever combine() must not read."""
        handle = entry.handle
        if entry.presummed:
            y = torch.full_like(handle.recv_x, torch.nan)
            rows = handle.recv_rows.long()
            y[rows] = 2 * handle.recv_x[rows]
            return y
        if handle.layout != "rows":
            return 2 * handle.expert_x
        num_routes = handle.num_routes
        y = handle.recv_x.new_full((handle.capacity, HIDDEN), torch.nan)
        y[:num_routes] = 2 * handle.recv_x[handle.expert_row_index[:num_routes].long()]
        return y

    def expected(self, entry: Open) -> torch.Tensor:
        if entry.presummed:
            x, topk_idx, _ = entry.inputs[self.ep.rank]
            ranks = [set((row[row >= 0] // EXPERTS_PER_RANK).tolist()) for row in topk_idx]
            rows = [2 * len(owners) * row for owners, row in zip(ranks, x, strict=True)]
            return torch.stack(rows).to(self.ep.device) if rows else x.to(self.ep.device)
        columns = [list(column) for column in zip(*entry.inputs, strict=True)]
        handles = reference.dispatch(*columns, num_experts=self.ep.num_experts, num_max_tokens_per_rank=TOKENS)
        y = [2 * h.recv_x[h.expert_row_index.clamp(min=0).long()] for h in handles]
        return reference.combine(y, handles)[self.ep.rank].to(self.ep.device)

    def write_to_a_view(self, entry: Open) -> None:
        name = self.own.choice(["recv_rows", "expert_row_index", "route_weights", "route_src_rank", "expert_counts"])
        getattr(entry.handle, name).fill_(self.own.choice([-(2**31), -1, 10**7, 2**31 - 128]))


def fuzz(group: Any, seed: int, num_steps: int) -> None:
    plan = random.Random(seed)
    group = moe_a2a.as_group(group)
    config = {
        "num_experts": EXPERTS_PER_RANK * group.num_ranks, "num_topk": TOPK, "hidden": HIDDEN,
        "num_max_tokens_per_rank": TOKENS, "dtype": torch.float32, "timeout": 30,
        "num_buffers": plan.randint(1, 3), "num_max_ll_tokens": plan.choice([0, 3, TOKENS]),
    }  # fmt: skip
    with moe_a2a.ExpertParallel(group, **config) as ep:
        Fuzz(ep, group, seed).run(num_steps)
