"""Tables of layers and of their products, for tables.py."""

from __future__ import annotations

from typing import Any

from table_text import results, table, us

BACKENDS = ("moe_a2a", "nccl")
OTHER_LAYERS = {", fused combine": ", combine fused", ", fp8": " fp8", ", fp8, fused combine": " fp8, combine fused"}


def layer(name: str) -> str:
    times: dict[int, dict[str, dict[str, Any]]] = {}
    for line in results(name)["lines"]:
        if line["launch"] == "eager":
            times.setdefault(line["tokens"], {})[line["system"]] = line
    rows = []
    for tokens, of in times.items():
        ours, by_torch = of["moe_a2a"], of["moe_a2a + torch._grouped_mm"]
        steps = of["moe_a2a, step by step"]
        others = {f"`MoELayer`{title}": of.get(f"moe_a2a{way}") for title, way in OTHER_LAYERS.items()}
        rows.append(
            [
                str(tokens),
                us(ours["us"]),
                us(steps["us"]),
                us(by_torch["us"]),
                f"{ours['us'] / min(steps['us'], by_torch['us']):.2f}",
                f"{ours['sm_mhz']:.0f}, {ours['watts']:.0f}",
                *(us(line["us"]) for line in others.values() if line),
            ]
        )
    peers = ["step by step in PyTorch", "with `torch._grouped_mm`"]
    titles = [title for title, line in others.items() if line]
    return table(["tokens per rank", "`MoELayer`", *peers, "`MoELayer` / best", "SM MHz, W", *titles], rows)


def fused_combine(name: str) -> str:
    """Whole layers with the second product and combine in two launches, and in one."""
    times: dict[int, dict[tuple[str, str], float]] = {}
    for line in results(name)["lines"]:
        times.setdefault(line["tokens"], {})[line["system"], line["launch"]] = line["us"]
    pairs = [(dtype, launch) for launch in ("eager", "graph") for dtype in ("", " fp8")]
    systems = [(f"moe_a2a{dtype}{form}", launch) for dtype, launch in pairs for form in ("", ", combine fused")]
    rows = [[str(tokens), *(us(of[system]) for system in systems)] for tokens, of in times.items()]
    titles = ["bf16", "fp8", "bf16 graph", "fp8 graph"]
    return table(["tokens per rank", *(cell for title in titles for cell in (f"{title}, separate", "fused"))], rows)


def experts(name: str, ours: str, peers: tuple[str, ...]) -> str:
    times: dict[int, dict[tuple[str, str], dict[str, Any]]] = {}
    for line in results(name)["lines"]:
        times.setdefault(line["rows"], {})[line["product"], line["system"]] = line
    rows = []
    for num_rows, of in times.items():
        cells = [str(num_rows // 64)]
        for product in ("gate_up", "down"):
            own = of[product, ours]
            cells += [us(own["us"]), *(us(of[product, peer]["us"]) for peer in peers), f"{own['share_of_limit']:.0%}"]
        rows.append(cells)
    names = [f"`{peer}`" if "." in peer else "DeepGEMM" for peer in peers]
    of_product = ["ours {0}", *(f"{name} {{0}}" for name in names), "of the limit {0}"]
    return table(["rows per expert", *(cell.format(i) for i in (1, 2) for cell in of_product)], rows)


def layer_alone(name: str) -> str:
    """The layer of one rank beside compositions with its own dispatch and combine."""
    times: dict[int, dict[str, float]] = {}
    for line in results(name)["lines"]:
        if line["launch"] == "eager":
            times.setdefault(line["tokens"], {})[line["system"]] = line["us"]
    systems = {
        "`MoELayer`": "moe_a2a",
        "with `torch._grouped_mm`": "moe_a2a + torch._grouped_mm",
        "with DeepGEMM": "moe_a2a + DeepGEMM",
        "`MoELayer`, fp8": "moe_a2a fp8",
        "with DeepGEMM, fp8": "moe_a2a + DeepGEMM fp8",
    }
    rows = [[str(tokens * 8 // 64), *(us(of[system]) for system in systems.values())] for tokens, of in times.items()]
    return table(["rows per expert", *systems], rows)


# By hidden and intermediate.
MODELS = {(2048, 768): "Qwen3-30B-A3B", (2880, 2880): "gpt-oss-120b", (4096, 14336): "Mixtral 8x7B"}


def layer_of_models(name: str) -> str:
    times: dict[tuple[str, int], dict[tuple[str, str], float]] = {}
    for line in results(name)["lines"]:
        case = MODELS[line["hidden"], line["intermediate"]], line["tokens"]
        times.setdefault(case, {})[line["system"], line["launch"]] = line["us"]
    rows = []
    for (model, tokens), of in times.items():
        eager, by_torch = of["moe_a2a", "eager"], of["moe_a2a + torch._grouped_mm", "eager"]
        ours = eager, of["moe_a2a", "graph"], of["moe_a2a fp8", "graph"]
        rows.append([model, str(tokens), *map(us, ours), us(by_torch), f"{eager / by_torch:.2f}"])
    titles = ["`MoELayer`", "`MoELayer`, graph", "`MoELayer`, fp8, graph"]
    return table(["shape of", "tokens per rank", *titles, "with `torch._grouped_mm`", "`MoELayer` / that"], rows)


def training(name: str) -> str:
    times: dict[int, dict[str, dict[str, float]]] = {}
    for line in results(name)["lines"]:
        times.setdefault(line["tokens"], {})[line["system"]] = line
    systems = {
        "`MoELayer`": "moe_a2a",
        "with `num_max_routes`": "moe_a2a, num_max_routes",
        "sort + all-to-all": "sort + all_to_all",
    }
    rows = [
        [str(tokens)]
        + [us(of[system][figure]) for figure in ("forward_us", "us") for system in systems.values()]
        + [f"{of['moe_a2a']['of_peer']:.2f}"]
        for tokens, of in times.items()
    ]
    titles = [f"{title}, {passes}" for passes in ("forward", "both") for title in systems]
    return table(["tokens per rank", *titles, "`MoELayer` / sort + all-to-all, both"], rows)


def data_parallel_calls(name: str) -> str:
    """Device time and host time of each call, ours and NCCL's."""
    lines = [line for line in results(name)["lines"] if "hidden" not in line["what"]]
    sizes = sorted({line["nbytes"] for line in lines})
    times = {(line["what"], line["nbytes"], line["backend"]): line for line in lines}
    rows = [
        [f"`{what}`" + (", host" if figure == "host_us" else "")]
        + [" / ".join(us(times[what, nbytes, backend][figure]) for backend in BACKENDS) for nbytes in sizes]
        for what in dict.fromkeys(line["what"] for line in lines)
        for figure in ("us", "host_us")
    ]
    return table(["KiB", *[str(nbytes // 1024) for nbytes in sizes]], rows)


def data_parallel_steps(name: str) -> str:
    lines = [line for line in results(name)["lines"] if "hidden" in line["what"]]
    steps: dict[str, dict[str, dict[str, float]]] = {}
    for line in lines:
        steps.setdefault(line["what"], {})[line["backend"]] = line
    rows = [
        [what, *[f"{of[backend]['us'] / 1000:.2f}" for backend in BACKENDS], f"{of['moe_a2a']['of_peer']:.2f}"]
        for what, of in steps.items()
    ]
    return table(["ms per step", "`moe_a2a`", "NCCL", "ratio"], rows)
