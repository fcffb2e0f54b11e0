"""The calls of a case (cases.py) on one rank, checked against the reference."""

import cases


def dispatch(ep, data, handle=None):
    """In halves or whole, checked; with `handle`, uses its routing instead of data's."""
    call, mine = data.call, data.on(ep.rank, ep.device)
    x, routing, bound = mine.x, (mine.topk_idx, mine.topk_weights), {}
    if handle is not None:
        routing = ()
    elif call.num_max_tokens_per_rank < ep.num_max_tokens_per_rank:
        bound = {"num_max_tokens_per_rank": call.num_max_tokens_per_rank}
    options = {
        **bound,
        "handle": handle,
        "quantize": data.quantize,
        "num_blocks": data.case.num_blocks,
        "x_scales": mine.x_scales,
    }
    if call.halves:
        handle = ep.dispatch_send(x, *routing, **options)
        ep.dispatch_recv(handle, **data.layout, num_blocks=data.case.num_blocks)
    else:
        handle = ep.dispatch(x, *routing, **options, **data.layout)
    cases.check_dispatch(handle, data, ep.rank)
    return handle


def combine(ep, data, handle):
    call, y = data.call, data.on(ep.rank, ep.device).y
    options = {"presummed": call.presummed, "wire": call.wires[ep.rank], "num_blocks": data.case.num_blocks}
    if call.halves:
        ep.combine_send(y, handle, **options)
        combined = ep.combine_recv(handle, num_blocks=data.case.num_blocks)
    else:
        combined = ep.combine(y, handle, **options)
    cases.assert_same("combined_x", combined.cpu(), data.combined[ep.rank], any_nan=True)


def run_call(ep, data, poison=True):
    """One call of the case on this rank, checked."""
    handle = dispatch(ep, data)
    if poison:
        cases.poison_past_the_end(handle, data.handles[ep.rank])
    if data.call.release:
        handle.release()
    else:
        combine(ep, data, handle)
    if data.call.again:
        other = cases.make_data(data.case, data.call, rows_seed=data.call.seed + 1)
        combine(ep, other, dispatch(ep, other, handle))
