#include "collectives/announcement.h"

#include <algorithm>
#include <iterator>

namespace moe_a2a {
namespace {

constexpr const char* kKinds[] = {"all_reduce", "reduce_scatter", "all_gather", "a refused call"};
constexpr const char* kOps[] = {"sum", "max", "min", "avg"};
constexpr const char* kCodecs[] = {"none", "fp8", "q8", "q6", "q4"};
constexpr const char* kAlgorithms[] = {"auto", "one_shot", "two_shot", "ring", "recursive_doubling", "direct"};

// `index` comes from a peer: if it is unknown, its number is shown.
template <size_t kCount>
std::string name_in(const char* const (&names)[kCount], uint64_t index) {
  return index < kCount ? names[index] : std::to_string(index);
}

}  // namespace

Announcement Announcement::of(const Terms& terms, int64_t count, uint64_t digest) {
  const uint64_t bytes[] = {static_cast<uint64_t>(terms.kind),  static_cast<uint64_t>(terms.dtype),
                            static_cast<uint64_t>(terms.op),    static_cast<uint64_t>(terms.algorithm),
                            static_cast<uint64_t>(terms.codec), static_cast<uint64_t>(terms.wire)};
  uint64_t word = 0;
  for (size_t i = 0; i < std::size(bytes); ++i) word |= bytes[i] << 8 * i;
  return {{word, static_cast<uint64_t>(count), digest}};
}

std::string describe(const Announcement& announcement) {
  const uint64_t word = announcement.word[0];
  const auto kind = Announcement::kind_of(word);
  std::string text = name_in(kKinds, word & 0xff) + " of " + std::to_string(announcement.word[1]) + " " +
                     name_of(static_cast<DType>(std::min<uint64_t>(word >> 8 & 0xff, 3)));
  if (kind != CollectiveKind::kAllGather) text += ", " + name_in(kOps, word >> 16 & 0xff);
  if ((word >> 24 & 0xff) != 0) text += ", " + name_in(kAlgorithms, word >> 24 & 0xff);
  if ((word >> 32 & 0xff) != 0) text += ", " + name_in(kCodecs, word >> 32 & 0xff);
  if (word >> 40 == static_cast<uint64_t>(CollectiveWire::kWords)) text += " in LL words";
  return text;
}

void raise_mismatch(const Report& report) {
  Announcement theirs, own;
  for (int i = 0; i < Announcement::kWords; ++i) {
    theirs.word[i] = report.refusal.word[i];
    own.word[i] = report.refusal.word[Announcement::kWords + i];
  }
  std::string what = "ranks disagree: rank " + std::to_string(report.rank) + " calls " + describe(own) + ", rank " +
                     std::to_string(report.peer) + " " + describe(theirs);
  if (theirs.word[0] == own.word[0] && theirs.word[1] == own.word[1]) {
    what += own.is_direct() ? ", on tensors that empty() made in another order, or with other counts"
                            : ", divided by different counts";
  }
  throw CallMismatch(what + "; make the same calls in the same order, with the same arguments, on every rank",
                     report.peer);
}

}  // namespace moe_a2a
