"""Under torch.compile(fullgraph=True) a call is one operator of the graph, and gives the bits that it gives eagerly."""

import gc
import itertools

import on_device
import pytest
import ranks
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck

import moe_a2a
import moe_a2a.quickreduce as qr

HIDDEN, NUM_EXPERTS, NUM_TOPK, INTERMEDIATE, MAX_TOKENS = 64, 8, 2, 32, 40

pytestmark = on_device.cpu_only


def draw(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_layer(group, seed=0):
    sizes = {"num_experts": NUM_EXPERTS, "num_topk": NUM_TOPK, "hidden": HIDDEN, "num_max_tokens_per_rank": MAX_TOKENS}
    ep = moe_a2a.ExpertParallel(group, **sizes, device="cpu", timeout=60)
    n = ep.num_local_experts
    w_gate_up, w_down = draw(n, 2 * INTERMEDIATE, HIDDEN, seed=seed), draw(n, HIDDEN, INTERMEDIATE, seed=seed + 1)
    return moe_a2a.MoELayer(ep, w_gate_up / 8, w_down / 8)


class Block(nn.Module):
    """A router, an MoE layer and something around them."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.router = nn.Linear(HIDDEN, NUM_EXPERTS, dtype=torch.bfloat16)
        with torch.no_grad():
            self.router.weight.copy_(draw(NUM_EXPERTS, HIDDEN, seed=7))

    def forward(self, x):
        weights, experts = self.router(x).float().softmax(-1).topk(NUM_TOPK)
        return x + self.layer(x * 2, experts, weights)


def counting_backend():
    # Takes seconds, which each worker of pytest-xdist would pay.
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    return CompileCounterWithBackend("aot_eager")


def compiled(function):
    """The function as one graph, and what returns the names of our operators in each graph that was compiled."""
    counter = counting_backend()

    def operators():
        targets = [[str(node.target) for node in graph.graph.nodes] for graph in counter.graphs]
        ours = [[target for target in names if target.startswith("moe_a2a.")] for names in targets]
        return [
            [name.removeprefix("moe_a2a.") for name in names] for names in ours if names
        ]  # PyTorch's own may be empty

    return torch.compile(function, backend=counter, fullgraph=True, dynamic=True), operators


@torch.no_grad()
def layer_program(group):
    block = Block(make_layer(group, seed=10 * group.rank()))
    graph, operators = compiled(block)
    for call in range(6):
        x = draw(5 + 3 * call + group.rank(), HIDDEN, seed=call)
        assert torch.equal(graph(x), block(x))
    assert operators() == [["moe_layer"]]


def test_a_layer_is_one_operator_for_any_number_of_tokens():
    ranks.run_processes(2, layer_program, timeout=120)


@torch.no_grad()
def collectives_program(group):
    coll = moe_a2a.Collectives(group, 1 << 16, device="cpu", timeout=60)
    counts = [3, 5]

    def steps(x, out):
        total = coll.all_reduce(x, "max") + coll.all_reduce(x, codec="q8", algorithm="two_shot")
        shares = coll.reduce_scatter(x), coll.reduce_scatter(x, "sum", counts)
        gathered = coll.all_gather(shares[0]), coll.all_gather(shares[1], counts)
        coll.all_reduce(x * 2, out=out)
        return total, *shares, *gathered, out + 1

    graph, operators = compiled(steps)
    for call in range(3):
        x = draw(8, 6, seed=call + 10 * group.rank())
        outs = torch.full_like(x, float("nan")), torch.full_like(x, float("nan"))
        for got, expected in zip(graph(x, outs[0]), steps(x, outs[1]), strict=True):
            assert torch.equal(got, expected)
        assert torch.equal(*outs)
    assert operators() == [["all_reduce"] * 2 + ["reduce_scatter"] * 2 + ["all_gather"] * 2 + ["all_reduce"]]


def test_collectives_are_operators():
    ranks.run_processes(2, collectives_program, timeout=120)


@torch.no_grad()
def test_make_fx_records_the_calls(objects):
    """Their results became constants of its graph, which returned them for any input."""
    (layer, coll), offsets, w = objects, routes()[1], draw(NUM_EXPERTS, 32, HIDDEN)
    calls = {
        "moe_layer": Block(layer),
        "all_reduce": lambda x: coll.all_reduce(x * 2) + 1,
        "grouped_gemm": lambda x: moe_a2a.grouped_gemm(x * 2, None, offsets, w),
    }
    for name, call in calls.items():
        graph = make_fx(call)(draw(10, HIDDEN))
        assert f"torch.ops.moe_a2a.{name}" in graph.code
        assert torch.equal(graph(draw(10, HIDDEN, seed=1)), call(draw(10, HIDDEN, seed=1)))
    with pytest.raises(ValueError, match=r"x is traced by make_fx\(\), which would not record this call on rank 0"):
        make_fx(lambda *batch: layer.ep.dispatch(*batch).recv_x)(*routed())


@torch.no_grad()
def test_quickreduce_is_an_operator():
    """Dynamo failed with a RecursionError, which is no graph break."""
    qr.init(1, 0)
    qr.set_comm_handles([qr.get_comm_handle()])
    x = draw(8, 6)
    for profile in (qr.Profile.FP16, qr.Profile.Q8, 5):
        graph, operators = compiled(lambda x, profile=profile: qr.allreduce(profile, x * 2))
        assert torch.equal(graph(x), qr.allreduce(profile, x * 2))
        assert operators() == [["all_reduce"]]
    qr.close()


def routes():
    offsets = torch.tensor([0, 3, 3, 7, 7, 7, 7, 8, 10], dtype=torch.int32)
    return torch.tensor([2, 0, 1, 9, -1, 3, 3, 8, 5, 6], dtype=torch.int32), offsets


@torch.no_grad()
def test_products_are_operators():
    row_index, offsets = routes()
    x, w = draw(10, 128), draw(NUM_EXPERTS, 2 * 128, 128, seed=1)
    scales = torch.rand(10, 1), torch.rand(NUM_EXPERTS, 2, 1)
    x8, w8 = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)

    def products(x, x8):
        plain = moe_a2a.grouped_gemm(x, row_index, offsets, w)
        gated = moe_a2a.grouped_gemm(x, None, offsets, w, "swiglu", limit=7.0, up_shift=1.0)
        options = {"x_scales": scales[0], "w_scales": scales[1]}
        half = moe_a2a.grouped_gemm(x8, row_index, offsets, w8, "gelu", **options, out_dtype=torch.float16)
        return (
            plain,
            gated,
            half,
            *moe_a2a.grouped_gemm(x8, row_index, offsets, w8, "swiglu", **options, quantize_output=True),
        )

    graph, operators = compiled(products)
    for got, expected in zip(graph(x, x8), products(x, x8), strict=True):
        assert got.dtype == expected.dtype and torch.equal(got.float(), expected.float())
    assert operators() == [["grouped_gemm"] * 3 + ["grouped_gemm_quantized"]]


@pytest.fixture
def objects():
    (group,) = moe_a2a.thread_group(1)
    with moe_a2a.Communicator(group, device="cpu") as comm:
        yield make_layer(comm), moe_a2a.Collectives(comm, 1 << 16)


def test_pytorch_s_own_checks_of_operators(objects):
    layer, coll = objects
    ops = torch.ops.moe_a2a
    x, experts, weights = draw(10, HIDDEN), torch.rand(10, NUM_EXPERTS).topk(NUM_TOPK).indices, torch.rand(10, NUM_TOPK)
    of_layer = (layer.w_gate_up, layer.w_down, None, None, layer._number.value)
    opcheck(ops.moe_layer, (x, experts, weights, *of_layer))
    opcheck(ops.moe_layer, (x, experts, None, *of_layer))
    opcheck(ops.all_reduce, (x, "sum", "auto", None, None, coll._number.value))
    opcheck(ops.reduce_scatter, (x, "sum", [10], 0, 1, coll._number.value))
    opcheck(ops.all_gather, (x, None, 1, coll._number.value))
    row_index, offsets = routes()
    options = {"gated": True, "interleaved": False, "alpha": 1.0, "limit": None, "up_shift": 0.0, "num_blocks": 0}
    w = draw(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN)
    tensors = x, row_index, offsets, w, None, None, None
    opcheck(ops.grouped_gemm, tensors, {**options, "activation": "silu", "out_dtype": None})


@torch.no_grad()
@pytest.mark.parametrize(
    "program",
    [lambda layer, x, *routing: x + layer(x, *routing), lambda layer, *arguments: layer(*arguments).sum()],
    ids=["residual", "sum"],
)
def test_a_rank_without_tokens_still_calls(objects, program):
    """Inductor removed the call: its result has no elements. The other ranks waited for it."""
    layer, _ = objects
    graph = torch.compile(lambda *arguments: program(layer, *arguments), fullgraph=True, dynamic=True)
    for num_tokens in (6, 0, 0):
        weights, experts = torch.rand(num_tokens, NUM_EXPERTS).topk(NUM_TOPK)
        before = layer.ep._num_dispatches
        graph(draw(num_tokens, HIDDEN), experts, weights)
        assert layer.ep._num_dispatches == before + 1


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [None, True])
def test_layers_compiled_one_by_one_share_a_graph(objects, dynamic):
    """Dynamo compiled each for its number, and refused the ninth."""
    ep, x = objects[0].ep, draw(6, HIDDEN)
    w_gate_up, w_down = objects[0].w_gate_up, objects[0].w_down
    blocks = [Block(moe_a2a.MoELayer(ep, w_gate_up * scale, w_down)) for scale in range(10)]
    counter = counting_backend()
    graphs = [torch.compile(block, backend=counter, fullgraph=True, dynamic=dynamic) for block in blocks]
    for graph, block in zip(graphs, blocks, strict=True):
        assert torch.equal(graph(x), block(x))
    assert counter.frame_count <= 2


def routed(num_tokens=6):
    weights, experts = torch.rand(num_tokens, NUM_EXPERTS).topk(NUM_TOPK)
    return draw(num_tokens, HIDDEN), experts, weights


@torch.no_grad()
def test_hooks_run_once(objects):
    layer, arguments = objects[0], routed()
    hooks = [
        layer.register_forward_hook(lambda module, given, result: result * 2),
        layer.register_forward_pre_hook(lambda module, given: (given[0] * 4, *given[1:])),
    ]
    try:
        assert torch.equal(compiled(layer)[0](*arguments), layer(*arguments))
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def test_a_graph_uses_the_weights_that_it_has(objects):
    layer, arguments = objects[0], routed()
    halved = {name: value * 0.5 for name, value in layer.named_parameters()}

    def swapped(parameters, *arguments):
        return torch.func.functional_call(layer, parameters, arguments)

    assert torch.equal(compiled(swapped)[0](halved, *arguments), swapped(halved, *arguments))
    was = layer.w_down.clone()

    def changed(*arguments):
        layer.w_down.mul_(2.0)
        return layer(*arguments)

    expected = changed(*arguments)
    layer.w_down.copy_(was)
    assert torch.equal(compiled(changed)[0](*arguments), expected)
    layer.w_down.copy_(was)


def test_calls_while_another_thread_compiles(objects, monkeypatch):
    """torch.compiler.is_compiling() is then true in every thread."""
    layer, coll = objects
    x, experts, weights = routed()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with torch.no_grad():
        assert layer(x, experts, weights).shape == x.shape
    assert torch.equal(coll.all_reduce(x), x)
    offsets = torch.tensor([0, 6], dtype=torch.int32)
    assert moe_a2a.grouped_gemm(x, None, offsets, draw(1, 16, HIDDEN)).shape == (6, 16)


def test_a_compiled_collective_checks_what_an_eager_one_checks(objects):
    _, coll = objects
    with pytest.raises(ValueError, match=r"out is \[4\] of torch.float32 .* expected \[1\]"):
        coll_all_reduce = torch.compile(lambda x, out: coll.all_reduce(x, out=out), backend="eager")
        coll_all_reduce(torch.ones(1), torch.zeros(4))
    with pytest.raises(ValueError, match=r"x has no dimension to split over the ranks on rank 0; pass x.reshape\(1\)"):
        torch.compile(coll.all_gather, backend="eager")(torch.tensor(1.0))


def test_the_shape_of_a_result_depends_on_arguments_only():
    """On anything else, a graph from PyTorch's cache on disk, which the ranks share, has another rank's shapes."""
    ops, x = torch.ops.moe_a2a, torch.empty(7, 3, device="meta")
    for rank, num_rows in enumerate((5, 2)):
        assert ops.reduce_scatter(x, "sum", [5, 2], rank, 2, 0).shape == (num_rows, 3)
    assert ops.all_gather(x, None, 4, 0).shape == (28, 3)


@torch.no_grad()
def test_export_keeps_the_operator(objects):
    block, x = Block(objects[0]), draw(6, HIDDEN)
    exported = torch.export.export(block, (x,))
    assert "torch.ops.moe_a2a.moe_layer" in exported.graph_module.code
    assert torch.equal(exported.module()(x), block(x))


def test_a_layer_whose_weights_require_grad_is_exported(objects):
    """In grad mode, which is export's default, it was refused: w_gate_up was a FakeTensor."""
    block, x = Block(objects[0]), draw(6, HIDDEN)
    block.requires_grad_(True)
    exported = torch.export.export(block, (x,))
    assert "torch.ops.moe_a2a.moe_layer" in exported.graph_module.code
    result = exported.module()(x)
    with torch.no_grad():
        assert torch.equal(result, block(x))
    with pytest.raises(RuntimeError, match="moe_a2a::moe_layer has no backward"):
        result.sum().backward()


@torch.no_grad()
def load_program(group, file, number) -> None:
    moe_a2a.operators._numbers = itertools.count(number)
    layer = make_layer(moe_a2a.thread_group(1)[0])
    assert layer._number.value == number
    loaded = torch.export.load(file).module()
    with pytest.raises(RuntimeError, match="a compiled graph uses object .*, which this process does not have"):
        loaded(draw(6, HIDDEN))


@torch.no_grad()
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_runs_in_its_process_only(tmp_path, strict):
    """In another process it ran with the object that had the same number there."""
    block = Block(make_layer(moe_a2a.thread_group(1)[0]))
    file = str(tmp_path / "block.pt2")
    torch.export.save(torch.export.export(block, (draw(6, HIDDEN),), strict=strict), file)
    assert torch.equal(torch.export.load(file).module()(draw(6, HIDDEN)), block(draw(6, HIDDEN)))
    ranks.run_processes(1, load_program, file, block.layer._number.value)


@pytest.mark.filterwarnings("ignore:Error detected in GeneratedBackward")
def test_a_backward_pass_is_refused_by_name(objects):
    x = draw(6, HIDDEN).requires_grad_()
    with pytest.raises(Exception, match="moe_a2a::all_reduce has no backward; call it under torch.no_grad"):
        compiled(objects[1].all_reduce)[0](x).sum().backward()


@torch.no_grad()
def test_a_graph_that_outlives_its_object_says_so():
    (group,) = moe_a2a.thread_group(1)
    coll = moe_a2a.Collectives(group, 1 << 16, device="cpu")
    number, x = coll._number.value, draw(4, 4)
    graph, _ = compiled(lambda x: torch.ops.moe_a2a.all_reduce(x, "sum", "auto", None, None, number))
    assert torch.equal(graph(x), x)
    coll.close()
    with pytest.raises(RuntimeError, match="Collectives object is closed"):
        graph(x)
    del coll
    gc.collect()
    with pytest.raises(RuntimeError, match=f"a compiled graph uses object {number} of moe_a2a"):
        graph(x)
