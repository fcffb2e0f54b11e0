// The steps of a call, appended to a program.
#pragma once

#include <initializer_list>
#include <vector>

#include "protocol/world.h"

namespace moe_a2a {

using Choices = std::vector<std::vector<int32_t>>;  // [token][k], see Routing

inline void append(Program& program, std::initializer_list<Launch> launches) {
  for (const Launch& launch : launches) program.push_back(launch);
}

inline void append_dispatch(Program& program, ModelRank& rank, int call) {
  append(program, {rank.dispatch_send(call), rank.dispatch_recv(call)});
}

inline void append_combine(Program& program, ModelRank& rank, int call) {
  append(program, {rank.experts(call), rank.combine_send(call), rank.combine_recv(call), rank.check_combined(call)});
}

}  // namespace moe_a2a
