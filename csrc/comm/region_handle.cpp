#include "comm/region_handle.h"

#include <algorithm>
#include <cstring>

#include "comm/fnv1a.h"

namespace moe_a2a {
namespace {

// Handles are untrusted bytes: text may be unterminated or unprintable.
template <size_t kSize>
std::string text(const char (&chars)[kSize]) {
  std::string text(chars, strnlen(chars, kSize));
  for (char& character : text) {
    if (character < ' ' || character > '~') character = '?';
  }
  return text;
}

int num_fields(const RegionHandle& a, const RegionHandle& b) {
  return std::clamp(std::min(a.num_fields, b.num_fields), 0, RegionHandle::kMaxFields);
}

std::string assignment(const AgreedField& field) { return text(field.name) + "=" + text(field.value); }

// What is wrong with the handle at place `r`, regardless of the others; empty: nothing.
std::string flaw(const RegionHandle& handle, size_t r) {
  const std::string which = "the handle at place " + std::to_string(r);
  if (handle.magic != RegionHandle::kMagic)
    return which + " is not a handle; pass what get_comm_handle() returned on that rank";
  if (handle.version != RegionHandle::kVersion) {
    return which + " has version " + std::to_string(handle.version) + ", expected " +
           std::to_string(RegionHandle::kVersion) + "; run the same version of moe_a2a on every rank";
  }
  if (handle.checksum != handle.sum()) {
    return which + " is damaged: its checksum does not match its bytes; pass it to every rank unchanged";
  }
  if (handle.rank != static_cast<int32_t>(r)) {
    return which + " is that of rank " + std::to_string(handle.rank) + "; pass the handles in rank order";
  }
  return {};
}

std::string difference(const RegionHandle& first, const RegionHandle& other, const std::string& there) {
  const std::string here = " on rank 0 but ", same = " on every rank";
  if (text(first.client) != text(other.client)) {
    return "ranks disagree: " + text(first.client) + here + text(other.client) + there +
           "; make the same objects in the same order" + same;
  }
  if (first.num_ranks != other.num_ranks) {
    return "ranks disagree: num_ranks=" + std::to_string(first.num_ranks) + here +
           "num_ranks=" + std::to_string(other.num_ranks) + there + "; pass the same num_ranks" + same;
  }
  for (int i = 0; i < num_fields(first, other); ++i) {
    if (assignment(first.field[i]) == assignment(other.field[i])) continue;
    return "ranks disagree: " + assignment(first.field[i]) + here + assignment(other.field[i]) + there +
           "; pass the same " + text(first.field[i].name) + same;
  }
  if (text(first.target) != text(other.target)) {
    return "ranks disagree: target " + text(first.target) + here + "target " + text(other.target) + there +
           "; pass the same kind of device" + same;
  }
  if (first.memory.nbytes != other.memory.nbytes || first.layout_digest != other.layout_digest) {
    return "ranks disagree: their heaps are laid out differently (" + std::to_string(first.memory.nbytes) + " bytes" +
           here + std::to_string(other.memory.nbytes) + " bytes" + there + "); run the same version of moe_a2a" + same;
  }
  return {};
}

}  // namespace

AgreedField agreed(const char* name, const std::string& value) {
  AgreedField field;
  std::strncpy(field.name, name, sizeof(field.name) - 1);
  std::strncpy(field.value, value.c_str(), sizeof(field.value) - 1);
  return field;
}

uint64_t RegionHandle::sum() const {
  RegionHandle unsealed = *this;
  unsealed.checksum = 0;
  unsigned char bytes[sizeof(RegionHandle)];
  std::memcpy(bytes, &unsealed, sizeof(bytes));
  Fnv1a hash;
  for (const unsigned char byte : bytes) hash.add(byte);
  return hash.digest;
}

uint64_t digest_of(const std::vector<RegionHandle>& handles) {
  Fnv1a hash;
  for (const RegionHandle& handle : handles) hash.add(handle.checksum);
  return hash.digest | 1;
}

std::string disagreement(const std::vector<RegionHandle>& handles) {
  for (size_t r = 0; r < handles.size(); ++r) {
    if (std::string why = flaw(handles[r], r); !why.empty()) return why;
  }
  for (size_t r = 0; r < handles.size(); ++r) {
    if (std::string why = difference(handles[0], handles[r], " on rank " + std::to_string(r)); !why.empty()) return why;
  }
  return {};
}

std::string not_own(const std::vector<RegionHandle>& handles, const RegionHandle& own) {
  const RegionHandle& passed = handles[own.rank];
  if (std::memcmp(&passed, &own, sizeof(own)) == 0) return {};
  std::string why = "the handle at place " + std::to_string(own.rank) + ", of rank " + std::to_string(own.rank) +
                    " itself, is another object's";
  for (int i = 0; i < num_fields(passed, own); ++i) {
    if (assignment(passed.field[i]) == assignment(own.field[i])) continue;
    why += " (" + assignment(passed.field[i]) + ", here " + assignment(own.field[i]) + ")";
    break;
  }
  return why + "; pass what get_comm_handle() of this object returned";
}

}  // namespace moe_a2a
