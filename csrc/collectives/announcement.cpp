#include "collectives/announcement.h"

#include <algorithm>
#include <iterator>

#include "comm/peer_errors.h"

namespace moe_a2a {
namespace {

constexpr const char* kKinds[] = {"all_reduce", "reduce_scatter", "all_gather", "barrier", "a refused call"};
constexpr const char* kOps[] = {"sum", "max", "min", "avg"};
constexpr const char* kCodecs[] = {"none", "fp8", "q8", "q6", "q4"};
constexpr const char* kAlgorithms[] = {"auto", "one_shot", "two_shot", "ring", "recursive_doubling", "direct"};

// `index` comes from a peer: if it is unknown, its number is shown.
template <size_t kCount>
std::string name_in(const char* const (&names)[kCount], uint32_t index) {
  return index < kCount ? names[index] : std::to_string(index);
}

}  // namespace

Announcement Announcement::of(const Terms& terms, int64_t count, uint64_t digest) {
  const uint32_t numbers[] = {static_cast<uint32_t>(terms.kind),  static_cast<uint32_t>(terms.dtype),
                              static_cast<uint32_t>(terms.op),    static_cast<uint32_t>(terms.algorithm),
                              static_cast<uint32_t>(terms.codec), static_cast<uint32_t>(terms.wire)};
  auto first = static_cast<uint32_t>(count >> 32) << 24;
  for (size_t i = 0; i < std::size(numbers); ++i) first |= numbers[i] << 4 * i;
  return {{first, static_cast<uint32_t>(count), static_cast<uint32_t>(digest ^ digest >> 32)}};
}

std::string describe(const Announcement& announcement) {
  using A = Announcement;
  const uint32_t kind = announcement.term(A::kKind), algorithm = announcement.term(A::kAlgorithm),
                 codec = announcement.term(A::kCodec);
  if (kind == static_cast<uint32_t>(CollectiveKind::kBarrier)) return name_in(kKinds, kind);
  std::string text = name_in(kKinds, kind) + " of " + std::to_string(announcement.count()) + " " +
                     name_of(static_cast<DType>(std::min<uint32_t>(announcement.term(A::kDType), 3)));
  if (kind != static_cast<uint32_t>(CollectiveKind::kAllGather))
    text += ", " + name_in(kOps, announcement.term(A::kOp));
  if (algorithm != 0) text += ", " + name_in(kAlgorithms, algorithm);
  if (codec != 0) text += ", " + name_in(kCodecs, codec);
  if (announcement.term(A::kWire) == static_cast<uint32_t>(CollectiveWire::kWords)) text += " in LL words";
  return text;
}

void raise_mismatch(const Report& report) {
  Announcement theirs, own;
  for (int i = 0; i < Announcement::kWords; ++i) {
    theirs.word[i] = static_cast<uint32_t>(report.refusal.word[i]);
    own.word[i] = static_cast<uint32_t>(report.refusal.word[Announcement::kWords + i]);
  }
  std::string what = "ranks disagree: rank " + std::to_string(report.rank) + " calls " + describe(own) + ", rank " +
                     std::to_string(report.peer) + " " + describe(theirs);
  if (theirs.word[0] == own.word[0] && theirs.word[1] == own.word[1]) {
    what += own.is_direct() ? ", on tensors that empty() made in another order, or with other counts or other rows"
                            : ", divided by different counts, or into rows of other shapes";
  }
  throw CallMismatch(report, what + "; make the same calls in the same order, with the same arguments, on every rank");
}

}  // namespace moe_a2a
