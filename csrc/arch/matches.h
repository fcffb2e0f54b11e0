// How a lane's value compares with those of the other lanes of its warp.
#pragma once

namespace moe_a2a {

struct Matches {
  int before;  // lanes of lower rank with the same value
  int total;   // lanes with the same value, this one included
};

}  // namespace moe_a2a
