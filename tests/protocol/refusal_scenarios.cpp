// A rank refuses a call, or ranks dispatch batches that do not fit together.
#include "scenarios.h"
#include "steps.h"

namespace moe_a2a {

// Rank 1 refuses call 1. No rank has sent to another before, so only credits hold the refusal back.
Scenario refused_dispatch() {
  return {.name = "a refused dispatch",
          .shape = {.num_topk = 2,
                    .num_calls = 3,
                    .routing = [](int rank, int call) { return call == 0 ? Choices{{rank, -1}} : Choices{{0, 1}}; }},
          .program = [](ModelRank& rank) {
            Program program;
            append_dispatch(program, rank, 0);
            append_combine(program, rank, 0);
            if (rank.rank() == 1) {
              append(program, {rank.refuse_dispatch(1)});
            } else {
              append_dispatch(program, rank, 1);
              append(program, {rank.expect_refusal(1), rank.release(1)});
            }
            append_dispatch(program, rank, 2);
            append_combine(program, rank, 2);
            return program;
          }};
}

// In call 1 only rank 1 dispatches float8 rows. Each rank refuses the other's, and releases the handle, or its combine
// was queued and is refused, too.
Scenario other_rows(bool queues_combine) {
  return {.name = queues_combine ? "rows of two dtypes, combine queued" : "rows of two dtypes",
          .shape = {.num_topk = 2, .num_calls = 3, .call_of_float8 = 1, .routing = to_everybody(1, 2)},
          .program = [=](ModelRank& rank) {
            Program program;
            append_dispatch(program, rank, 0);
            append_combine(program, rank, 0);
            append_dispatch(program, rank, 1);
            if (queues_combine) append(program, {rank.combine_send(1), rank.combine_recv(1)});
            append(program, {rank.expect_refusal(1 - rank.rank(), false)});
            if (!queues_combine) append(program, {rank.release(1)});
            append_dispatch(program, rank, 2);
            append_combine(program, rank, 2);
            return program;
          }};
}

// In call 1 the ranks disagree on the bound. Nobody waits for the rows of that call, and in call 2 those of rank 0 land
// where a row of rank 1 has been.
Scenario other_bound(bool queues_combine) {
  Scenario scenario = other_rows(queues_combine);
  scenario.name = queues_combine ? "two bounds of tokens, combine queued" : "two bounds of tokens";
  scenario.shape.num_max_tokens = 4;
  scenario.shape.call_of_float8 = -1;
  scenario.shape.bound = [](int rank, int call) { return call == 1 && rank == 1 ? 2 : 4; };
  scenario.shape.routing = [](int rank, int call) { return Choices(call == 2 && rank == 0 ? 3 : 1, {0, 1}); };
  return scenario;
}

// Rank 1 refuses its first combine and makes a second attempt.
Scenario refused_combine() {
  return {.name = "a refused combine",
          .shape = {.num_topk = 2, .num_calls = 2, .routing = to_everybody(1, 2)},
          .program = [](ModelRank& rank) {
            Program program;
            append_dispatch(program, rank, 0);
            append(program, {rank.experts(0)});
            if (rank.rank() == 1) append(program, {rank.refuse_combine(0, 1)});
            append(program, {rank.combine_send(0), rank.combine_recv(0)});
            if (rank.rank() == 0) append(program, {rank.note_refusal(1), rank.combine_recv_again(0)});
            append(program, {rank.check_combined(0)});
            append_dispatch(program, rank, 1);
            append_combine(program, rank, 1);
            return program;
          }};
}

// Rank 1 refuses its combine and releases the handle.
Scenario abandoned_combine() {
  return {.name = "a refused combine, given up",
          .shape = {.num_max_tokens = 2, .num_topk = 2, .num_blocks = 2, .routing = to_everybody(2, 2)},
          .program = [](ModelRank& rank) {
            Program program;
            append_dispatch(program, rank, 0);
            append(program, {rank.experts(0)});
            if (rank.rank() == 1) {
              append(program, {rank.refuse_combine(0, 1), rank.release(0)});
            } else {
              append(program, {rank.combine_send(0), rank.combine_recv(0), rank.expect_refusal(1)});
            }
            append_dispatch(program, rank, 1);
            append_combine(program, rank, 1);
            return program;
          }};
}

// Rank 1 refuses twice, on different buffers: no credit separates the two, and the texts may mix.
Scenario refused_twice() {
  return {.name = "two refused dispatches",
          .shape = {.num_topk = 2, .num_buffers = 2, .num_calls = 3, .routing = to_everybody(1, 2)},
          .program = [](ModelRank& rank) {
            Program program;
            for (int call = 0; call < 2; ++call) {
              if (rank.rank() == 1) {
                append(program, {rank.refuse_dispatch(call)});
              } else {
                append_dispatch(program, rank, call);
                append(program, {rank.expect_refusal(1, false), rank.release(call)});
              }
            }
            append_dispatch(program, rank, 2);
            append_combine(program, rank, 2);
            return program;
          }};
}

}  // namespace moe_a2a
