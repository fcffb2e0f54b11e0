// Names of launches and slices in reports and traces. Each client of a communicator brings a Vocabulary; codes are
// unique across clients, since each vocabulary has its own first code.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace moe_a2a {

// A launch, or a part of one that reports and traces name separately: a role of a fused launch, or goodbye's wait
// (kClose). Clients number theirs from kFirstOfClients.
enum class Operation : int32_t { kNone, kClose, kAlignClocks, kGoodbye, kFirstOfClients = 16 };

// A slice or an instant of a trace; 5 bits of a record. Clients number theirs from kFirstOfClients.
enum class TraceKind : int32_t {
  kKernel,     // a launch, or a block's role in it; token: the Operation
  kGaveUp,     // an instant: the wait that ends here gave up
  kPeerWait,   // for `peer` to close
  kClockWait,  // for the clock of `peer`
  kSend,       // a row, until its stores are done and signalled, or with TMA until they are issued
  kSendLl,     // LL words, which need no signal: see record_send_ll()
  kSignal,     // an instant: a signal to `peer` that a token's row or sum is there
  kReduce,     // the contributions of all ranks are added up
  kFirstOfClients,
  kLimit = 32,
};

struct SliceName {
  const char* name;
  const char* awaited = nullptr;  // of a wait: what it waits for, as reports say it
  bool of_a_token = false;        // whether reports name the token waited for
};

struct Vocabulary {
  const char* client;
  const char* memory_advice = nullptr;  // what to pass when memory runs out
  Operation first_operation;
  std::span<const char* const> operations;
  TraceKind first_kind;
  std::span<const SliceName> kinds;

  // kNone if there is no such operation.
  constexpr Operation operation_named(std::string_view name) const {
    for (size_t i = 0; i < operations.size(); ++i) {
      if (name == operations[i]) return Operation{static_cast<int32_t>(first_operation) + static_cast<int32_t>(i)};
    }
    return Operation::kNone;
  }
  // Null if the code belongs to another vocabulary.
  constexpr const char* name_of(Operation operation) const {
    const auto i = static_cast<size_t>(static_cast<int32_t>(operation) - static_cast<int32_t>(first_operation));
    return i < operations.size() ? operations[i] : nullptr;
  }
  constexpr const SliceName* name_of(TraceKind kind) const {
    const auto i = static_cast<size_t>(static_cast<int32_t>(kind) - static_cast<int32_t>(first_kind));
    return i < kinds.size() ? &kinds[i] : nullptr;
  }
};

// The communicator's own vocabulary.
inline constexpr const char* kCommOperations[] = {"none", "close", "align_clocks", "goodbye"};
inline constexpr SliceName kCommKinds[] = {
    {"kernel"}, {"gave_up"}, {"peer_wait", "peer"}, {"clock_wait", "clock"}, {"send"}, {"send_ll"},
    {"signal"}, {"reduce"}};
inline constexpr Vocabulary kCommVocabulary{.client = "Communicator",
                                            .first_operation = Operation::kNone,
                                            .operations = kCommOperations,
                                            .first_kind = TraceKind::kKernel,
                                            .kinds = kCommKinds};
static_assert(std::size(kCommKinds) == static_cast<size_t>(TraceKind::kFirstOfClients));

}  // namespace moe_a2a
