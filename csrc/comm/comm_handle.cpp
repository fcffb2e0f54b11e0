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

// A handle's bytes are anybody's: its target need not end, nor be text.
std::string target_text(const CommHandle& handle) {
  std::string text(handle.target, strnlen(handle.target, sizeof(handle.target)));
  for (char& character : text) {
    if (character < ' ' || character > '~') character = '?';
  }
  return text;
}

// Why the bytes at place `r` are no handle of a rank; empty when they are.
std::string flaw(const CommHandle& handle, size_t r) {
  const std::string which = "the handle at place " + std::to_string(r);
  if (handle.magic != CommHandle::kMagic) return which + " is none; pass what get_comm_handle() returned on that rank";
  if (handle.version != CommHandle::kVersion) {
    return which + " has version " + std::to_string(handle.version) + ", expected " +
           std::to_string(CommHandle::kVersion) + "; run the same version of moe_a2a on every rank";
  }
  if (handle.checksum != handle.sum()) {
    return which + " is damaged: its checksum is not that of its bytes; carry it to every rank unchanged";
  }
  if (handle.rank != static_cast<int32_t>(r)) {
    return which + " is that of rank " + std::to_string(handle.rank) + "; pass the handles in rank order";
  }
  return {};
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
  handle.seal();
  return handle;
}

// FNV-1a.
uint64_t CommHandle::sum() const {
  CommHandle unsealed = *this;
  unsealed.checksum = 0;
  unsigned char bytes[sizeof(CommHandle)];
  std::memcpy(bytes, &unsealed, sizeof(bytes));
  uint64_t hash = 0xcbf29ce484222325u;
  for (const unsigned char byte : bytes) hash = (hash ^ byte) * 0x100000001b3u;
  return hash;
}

std::string disagreement(const std::vector<CommHandle>& handles) {
  for (size_t r = 0; r < handles.size(); ++r) {
    if (std::string why = flaw(handles[r], r); !why.empty()) return why;
  }
  const CommHandle& first = handles.front();
  for (size_t r = 0; r < handles.size(); ++r) {
    const CommHandle& other = handles[r];
    const std::string who = " on rank 0 but ", there = " on rank " + std::to_string(r);
    for (const AgreedField& field : kAgreedFields) {
      if (first.*field.value == other.*field.value) continue;
      return std::string("ranks disagree: ") + field.name + "=" + value_text(field, first) + who + field.name + "=" +
             value_text(field, other) + there + "; pass the same " + field.name + " on every rank";
    }
    if (std::strncmp(first.target, other.target, sizeof(first.target)) != 0) {
      return "ranks disagree: target " + target_text(first) + who + "target " + target_text(other) + there +
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

std::string not_own(const std::vector<CommHandle>& handles, const CommHandle& own) {
  const CommHandle& passed = handles[own.rank];
  if (std::memcmp(&passed, &own, sizeof(own)) == 0) return {};
  std::string why = "the handle at place " + std::to_string(own.rank) + ", of rank " + std::to_string(own.rank) +
                    " itself, is another object's";
  for (const AgreedField& field : kAgreedFields) {
    if (passed.*field.value == own.*field.value) continue;
    why += std::string(" (") + field.name + "=" + value_text(field, passed) + ", here " + field.name + "=" +
           value_text(field, own) + ")";
    break;
  }
  return why + "; pass what get_comm_handle() of this object returned";
}

}  // namespace moe_a2a
