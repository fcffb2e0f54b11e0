// What a rank tells every other about its batch: the number of tokens, and what must be the same on all ranks: the
// bound on that number, and the format of the rows.
#pragma once

#include "comm/signal.h"
#include "moe/moe_config.h"

namespace moe_a2a {

// A batch of n tokens whose bound is 2^e has the number 2^e + e + n: the numbers of one bound end where those of the
// next begin. Only the largest bound, the object's num_max_tokens_per_rank, need not be a power of two; it has the
// numbers of the next one.
struct BatchHeader {
  static constexpr uint32_t kNumFormats = 3;
  static constexpr uint32_t kRefused = Signal::kPayloadMask;  // no batch: see RefuseDispatch
  static_assert(kNumFormats * (MoeConfig::batch_number(kMaxTokensPerRank) + kMaxTokensPerRank + 1) < kRefused);

  // config: of the batch.
  MOE_A2A_HOST_DEVICE static uint32_t pack(const MoeConfig& config, int num_tokens, RowFormat format) {
    return kNumFormats * (config.first_batch_number + num_tokens) + static_cast<uint32_t>(format);
  }
  // Of a batch with the same bound; of any other, a number that no such batch can have.
  MOE_A2A_HOST_DEVICE static int num_tokens(const MoeConfig& config, uint32_t header) {
    return static_cast<int>(header / kNumFormats - config.first_batch_number);
  }
  MOE_A2A_HOST_DEVICE static bool has_bound_of(const MoeConfig& config, uint32_t header) {
    const int n = num_tokens(config, header);
    return n >= 0 && n <= config.num_max_tokens_per_rank;
  }
  MOE_A2A_HOST_DEVICE static RowFormat format(uint32_t header) { return RowFormat{header % kNumFormats}; }

  // For reports: the exponent of the bound, and the format.
  struct Kind {
    int exponent;
    RowFormat format;

    MOE_A2A_HOST_DEVICE static Kind of(uint32_t header) {
      const int number = static_cast<int>(header / kNumFormats);
      int exponent = 0;
      while (number > (2 << exponent) + exponent) ++exponent;
      return {exponent, BatchHeader::format(header)};
    }
    MOE_A2A_HOST_DEVICE uint32_t packed() const {
      return kNumFormats * static_cast<uint32_t>(exponent) + static_cast<uint32_t>(format);
    }
    static Kind unpacked(uint32_t kind) {
      return {static_cast<int>(kind / kNumFormats), RowFormat{kind % kNumFormats}};
    }
  };
};

}  // namespace moe_a2a
