// The one function that waits. It knows what it waits for, has a deadline, and returns normally.
#pragma once

#include "arch/arch.h"
#include "comm/heap_view.h"
#include "comm/report.h"
#include "comm/signal.h"
#include "comm/trace_buffer.h"

namespace moe_a2a {

// What a wait is for, in the terms of a report.
struct WaitSite {
  Operation operation;
  TraceKind awaited;
  int peer;
  int token = -1;
  int buffer = 0;           // whose refusal text to report
  bool is_recorded = true;  // in the trace; if several threads wait for parts of one thing, only one records
};

// A signal that also ends a wait, once it carries the awaited epoch and a RefusalCount that is news to the caller.
struct Refusal {
  const Signal* signal = nullptr;
  uint32_t attempt = 1;     // the caller's
  uint32_t num_strays = 0;  // strays of the awaited rank that the caller knows of
  uint64_t call = 0;        // which call of the caller's this is, for the report

  MOE_A2A_HOST_DEVICE bool is_news(uint32_t payload) const {
    return payload == RefusalCount::kFinal || RefusalCount::attempt_of(payload) >= attempt ||
           RefusalCount::strays_of(payload) > num_strays;
  }
};

// Per rank, how many strays the caller knows of.
struct SeenStrays {
  uint16_t of_rank[kMaxRanks] = {};
};

// How long to wait and whom to tell.
struct WaitPolicy {
  uint64_t timeout_ticks = 0;
  double ticks_per_second = 1;
  Reports* reports = nullptr;              // host-visible
  uint32_t* num_reports = nullptr;         // this rank's, see ClientServices
  uint32_t* poison = nullptr;              // this rank's word in the CommRegion; null: a failed wait tells no rank
  const HeapView* comm_heap = nullptr;     // locates the poison of the other ranks; read by failed waits only
  const uint64_t* refusal_text = nullptr;  // ClientServices::refusal_text
  TraceBuffer trace;
};

}  // namespace moe_a2a

namespace moe_a2a::inline MOE_A2A_TARGET {

// Fills the report of this kind, unless there is one that the host has not handled. `word`: the poison, or the
// refusal's payload. Rare functions take a site by value: passed by reference, the object would live in memory on the
// common path too, and each wait would write it before its first poll.
MOE_A2A_RARE void write_report(const WaitPolicy& policy, const HeapView& heap, WaitSite site, Reason reason,
                               uint32_t word, uint64_t expected_epoch, uint64_t seen_word, uint64_t waited) {
  Report* report = &policy.reports->of(reason);
  uint32_t* num_reports = policy.num_reports + Reports::index_of(reason);
  // Pairs with the release in Client::raise_refusal(): the host has copied the report before this one.
  const uint32_t before = atomic_load<Order::kAcquire, Scope::kSystem>(&report->num_noticed);
  if (!atomic_claim<Order::kRelaxed, Scope::kDevice>(num_reports, before, before + 1)) return;
  report->reason = reason;
  report->operation = site.operation;
  report->awaited = site.awaited;
  report->rank = heap.rank;
  report->peer = site.peer;
  report->token = site.token;
  report->reporter = reason == Reason::kPoisoned ? Poison::reporter_of(word) : heap.rank;
  report->culprit = reason == Reason::kPoisoned ? Poison::culprit_of(word) : site.peer;
  report->expected_epoch = expected_epoch;
  report->seen_epoch = Signal::epoch_of(seen_word);
  report->elapsed_seconds = static_cast<double>(waited) / policy.ticks_per_second;
  if (reason == Reason::kRefused) {
    report->buffer = site.buffer;
    report->refusal_count = word;
    const uint64_t* text = policy.refusal_text + (site.buffer * heap.num_ranks + site.peer) * kRefusalWords;
    for (int i = 0; i < kRefusalWords; ++i) {
      report->refusal.word[i] = atomic_load<Order::kRelaxed, Scope::kSystem>(text + i);
    }
  }
  atomic_store<Order::kRelease, Scope::kSystem>(&report->is_complete, 1u);  // pairs with the host's acquire
}

// Tells every rank, this one first, that this rank has given up waiting for `culprit`, so that no rank waits for one
// that has left.
MOE_A2A_RARE void poison_all(const WaitPolicy& policy, const HeapView& heap, int culprit) {
  const uint32_t word = Poison::pack(heap.rank, culprit);
  for (int i = 0; i < heap.num_ranks; ++i) {
    const int peer = (heap.rank + i) % heap.num_ranks;
    atomic_store<Order::kRelaxed, Scope::kSystem>(policy.comm_heap->peer(peer, policy.poison), word);
  }
}

// Not 0 once a wait on this rank has given up, or one on a peer, which told this rank.
MOE_A2A_DEVICE uint32_t poison_of(const WaitPolicy& policy) {
  return policy.poison != nullptr ? atomic_load<Order::kRelaxed, Scope::kSystem>(policy.poison) : 0;
}

// False if the wait must give up.
MOE_A2A_DEVICE bool may_wait_on(const WaitPolicy& policy, const HeapView& heap, const WaitSite& site, uint64_t start,
                                uint64_t expected_epoch, uint64_t seen_word) {
  if (is_interrupted()) return false;  // the host tells the peers
  const uint64_t waited = clock_now() - start;
  if (const uint32_t poison = poison_of(policy); poison != 0) {
    write_report(policy, heap, site, Reason::kPoisoned, poison, expected_epoch, seen_word, waited);
    return false;
  }
  if (waited < policy.timeout_ticks) return true;
  write_report(policy, heap, site, Reason::kTimeout, 0, expected_epoch, seen_word, waited);
  if (policy.poison != nullptr) poison_all(policy, heap, site.peer);
  return false;
}

// Whether the awaited rank has refused its part of this epoch. Pairs with the release in signal_many().
MOE_A2A_DEVICE bool is_refused(const WaitPolicy& policy, const HeapView& heap, const WaitSite& site, uint64_t start,
                               uint64_t epoch, const Refusal& refusal) {
  if (refusal.signal == nullptr) return false;
  const uint64_t refused = atomic_load<Order::kAcquire, Scope::kSystem>(&refusal.signal->word);
  if (Signal::epoch_of(refused) != epoch || !refusal.is_news(Signal::payload_of(refused))) return false;
  write_report(policy, heap, site, Reason::kRefused, Signal::payload_of(refused), epoch, Signal::pack(refusal.call, 0),
               clock_now() - start);
  return true;
}

// A wait's periodic check: refusal, interrupt, poison, deadline. False if it must give up. Cold path, kept out of line.
MOE_A2A_RARE bool look_around(const WaitPolicy& policy, const HeapView& heap, WaitSite site, uint64_t start,
                              uint64_t epoch, uint64_t seen_word, Refusal refusal) {
  return !is_refused(policy, heap, site, start, epoch, refusal) &&
         may_wait_on(policy, heap, site, start, epoch, seen_word);
}

// A wait whose first poll succeeds leaves no record.
MOE_A2A_RARE void append_wait(const WaitPolicy& policy, WaitSite site, uint64_t start, uint32_t polls, bool given_up) {
  const uint64_t now = clock_now();
  append(policy.trace, {.kind = site.awaited, .begin = start, .peer = site.peer, .token = site.token, .polls = polls},
         now);
  if (given_up) {
    append(policy.trace, {.kind = TraceKind::kGaveUp, .begin = now, .peer = site.peer, .token = site.token}, now);
  }
}

MOE_A2A_DEVICE void record_wait(const WaitPolicy& policy, const WaitSite& site, uint64_t start, uint32_t polls,
                                bool given_up = false) {
  if (kRecording && polls > 1 && trace_is_on() && site.is_recorded) append_wait(policy, site, start, polls, given_up);
}

// Waits until ready(seen) is true; false if it gave up. Calls look_around() only every kPollsPerLook polls, so as not
// to slow down the poll that succeeds. `seen`, a signal's word with the newest epoch that has arrived, goes into the
// report.
template <class Ready>
MOE_A2A_DEVICE bool wait_until(uint64_t epoch, const WaitSite& site, const WaitPolicy& policy, const HeapView& heap,
                               const Refusal& refusal, Ready ready) {
  uint64_t start = trace_now();
  for (uint32_t polls = 1;; ++polls) {
    uint64_t seen = 0;
    if (ready(seen)) {
      record_wait(policy, site, start, polls);
      return true;
    }
    if (polls % kPollsPerLook == 0) {
      if (start == 0) start = clock_now();
      if (!look_around(policy, heap, site, start, epoch, seen, refusal)) {
        record_wait(policy, site, start, polls, true);
        return false;
      }
    }
    pause(polls);
  }
}

// Whether `signal` carries `epoch` or a later one. If so, everything released with it is visible, and its payload is
// read.
template <Order kThen = Order::kAcquire>
MOE_A2A_DEVICE bool has_arrived(const Signal* signal, uint64_t epoch, uint64_t& word, uint32_t* payload) {
  constexpr Order kPoll = kThen == Order::kAcquire ? kPollOrder : Order::kRelaxed;
  word = atomic_load<kPoll, Scope::kSystem>(&signal->word);
  if (!Signal::reached(word, epoch)) return false;
  if constexpr (kPoll != kThen) word = atomic_load<kThen, Scope::kSystem>(&signal->word);
  if (payload != nullptr) *payload = Signal::payload_of(word);
  return true;
}

// Waits until `signal` (in this rank's heap) carries `epoch` or a later one; false if it gave up. The acquire pairs
// with the release in signal_many(). Where an acquire per poll is expensive (kPollOrder), the poll is relaxed and
// followed by one acquire load: the word is monotone, so that load sees the same epoch or a later one. Pass kRelaxed to
// wait for the word alone, with nothing behind it.
template <Order kThen = Order::kAcquire>
MOE_A2A_DEVICE bool wait_for(const Signal* signal, uint64_t epoch, const WaitSite& site, const WaitPolicy& policy,
                             const HeapView& heap, uint32_t* payload = nullptr, const Refusal& refusal = {}) {
  return wait_until(epoch, site, policy, heap, refusal,
                    [&](uint64_t& word) { return has_arrived<kThen>(signal, epoch, word, payload); });
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
