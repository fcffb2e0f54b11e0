#include "comm/comm_handle.h"

#include <cstring>

namespace moe_a2a {
namespace {

struct AgreedField {
  const char* name;
  int32_t CommHandle::* value;
};
constexpr AgreedField kAgreedFields[] = {
    {"num_ranks", &CommHandle::num_ranks},
    {"num_experts", &CommHandle::num_experts},
    {"num_topk", &CommHandle::num_topk},
    {"hidden", &CommHandle::hidden},
    {"num_buffers", &CommHandle::num_buffers},
    {"num_max_tokens_per_rank", &CommHandle::num_max_tokens_per_rank},
    {"num_max_ll_tokens", &CommHandle::num_max_ll_tokens},
    {"dtype", &CommHandle::dtype},
};

const char* dtype_name(int32_t dtype) {
  constexpr const char* kNames[] = {"float32", "float16", "bfloat16", "float8"};
  return dtype >= 0 && dtype < 4 ? kNames[dtype] : "unknown";
}

std::string value_text(const AgreedField& field, const CommHandle& handle) {
  const int32_t value = handle.*field.value;
  return field.value == &CommHandle::dtype ? dtype_name(value) : std::to_string(value);
}

}  // namespace

CommHandle make_comm_handle(const MoeConfig& config, const std::string& target, const MemoryHandle& memory,
                            uint64_t layout_digest) {
  CommHandle handle{.memory = memory,
                    .layout_digest = layout_digest,
                    .rank = config.rank,
                    .num_ranks = config.num_ranks,
                    .num_experts = config.num_experts,
                    .num_topk = config.num_topk,
                    .hidden = config.hidden,
                    .num_max_tokens_per_rank = config.num_max_tokens_per_rank,
                    .num_buffers = config.num_buffers,
                    .num_max_ll_tokens = config.num_max_ll_tokens,
                    .dtype = static_cast<int32_t>(config.dtype)};
  std::strncpy(handle.target, target.c_str(), sizeof(handle.target) - 1);
  return handle;
}

std::string disagreement(const std::vector<CommHandle>& handles) {
  const CommHandle& first = handles.front();
  for (size_t r = 0; r < handles.size(); ++r) {
    const CommHandle& other = handles[r];
    const std::string who = " on rank 0 but ", there = " on rank " + std::to_string(r);
    if (other.rank != static_cast<int32_t>(r)) {
      return "the handle at place " + std::to_string(r) + " is that of rank " + std::to_string(other.rank) +
             "; pass the handles in rank order";
    }
    for (const AgreedField& field : kAgreedFields) {
      if (first.*field.value == other.*field.value) continue;
      return std::string("ranks disagree: ") + field.name + "=" + value_text(field, first) + who + field.name + "=" +
             value_text(field, other) + there + "; pass the same " + field.name + " on every rank";
    }
    if (std::strncmp(first.target, other.target, sizeof(first.target)) != 0) {
      return std::string("ranks disagree: target ") + first.target + who + "target " + other.target + there +
             "; pass the same kind of device on every rank";
    }
    if (first.memory.nbytes != other.memory.nbytes || first.layout_digest != other.layout_digest) {
      return "ranks disagree: their heaps are laid out differently (" + std::to_string(first.memory.nbytes) + " bytes" +
             who + std::to_string(other.memory.nbytes) + " bytes" + there +
             "); run the same version of moe_a2a on every rank";
    }
  }
  return {};
}

}  // namespace moe_a2a
