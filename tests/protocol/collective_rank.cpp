// Compiled with -fsanitize=thread, see compiler_hooks.cpp: the kernels are instantiated here and nowhere else.
#include "collective_rank.h"

#include <cmath>
#include <cstring>

#include "collectives/one_shot_words.h"
#include "collectives/recursive_doubling.h"
#include "collectives/refuse_collective.h"
#include "collectives/ring.h"

namespace moe_a2a {
namespace {

using Kind = ModelCall::Kind;

constexpr int64_t kShareBytes = CollectiveRank::kSlice * sizeof(float);
// A line per chunk, and one per chunk of the results.
constexpr int64_t kLineBytes = 2 * CollectiveRank::kSlice / CollectiveRank::kChunk *
                               LineLayout{CollectiveRank::kCodec, CollectiveRank::kChunk}.stride();
constexpr CollectiveBytes kBytes{.share = kLineBytes,
                                 .words = CollectiveRank::kWordsBytes,
                                 .tensors = 2 * CollectiveRank::kMaxElements * sizeof(float)};

}  // namespace

RegionSize CollectiveRank::size_of(int num_ranks) {
  CommContext comm_context;
  CollectiveContext context;
  const RegionSize comm = place_region(comm_context, num_ranks, nullptr, nullptr);
  const RegionSize own = place_region(context, num_ranks, kBytes, nullptr, nullptr);
  return {comm.symmetric_bytes + own.symmetric_bytes, comm.local_bytes + own.local_bytes, own.layout_digest};
}

CollectiveRank::CollectiveRank(const CollectiveCase& shape, int rank, std::byte* symmetric, std::byte* local,
                               Reports* reports)
    : ExploredRank(context_, size_of(shape.num_ranks), local, reports), shape_(shape) {
  const RegionSize comm = connect(rank, shape.num_ranks, symmetric);
  place_region(context_, shape.num_ranks, kBytes, own_heap_ + comm.symmetric_bytes, local + comm.local_bytes);
  x_ = reinterpret_cast<float*>(context_.region.tensors.data);
  out_ = x_ + kMaxElements;
}

void CollectiveRank::reset() {
  clear();
  const uint64_t newest = shape_.first_epoch;
  if (newest == 0) return;
  const CollectiveRegion& region = context_.region;
  region.state(0).progress = newest << CallState::kProgressBits;
  for (const uint64_t epoch : {newest - 1, newest}) {
    const Signal old{Signal::pack(epoch, 0)};
    const int half = static_cast<int>(epoch % 2);
    for (int r = 0; r < shape_.num_ranks; ++r) {
      region.call_signal(half, r) = old;
      for (int i = 0; i < kMaxChunks; ++i) region.chunk_signal(half, r, i) = region.result_signal(half, r, i) = old;
      const LlWord old_word{.data = {0}, .stamp = ll_stamp(epoch)};
      for (int i = 0; i < kAnnouncementWords; ++i) {
        std::memcpy(region.announcement.at(half, r, i * int64_t{sizeof(LlWord)}), &old_word, sizeof(LlWord));
      }
      for (size_t i = 0; i < 2 * kWordsBytes; i += sizeof(LlWord)) {
        std::memcpy(region.words.at(half, r, static_cast<int64_t>(i)), &old_word, sizeof(LlWord));
      }
    }
  }
}

Program CollectiveRank::program() {
  Program program;
  for (int call = 0; call < static_cast<int>(shape_.calls.size()); ++call) {
    if (shape_.calls[call].refusing_rank == rank()) {
      program.push_back(refuse(call));
      continue;
    }
    if (shape_.calls[call].late_rank == rank()) program.push_back(be_late());
    program.push_back(prepare(call));
    for (int i = 0; i < num_slices(call); ++i) program.push_back(slice(call, i));
    program.push_back(check(call));
  }
  return program;
}

// ---- a call

// Even, but not in units.
Shares CollectiveRank::shares(int call) const {
  Shares shares;
  for (int r = 1; r <= shape_.num_ranks; ++r) shares.offset[r] = num_elements(call) * r / shape_.num_ranks;
  return shares;
}

int CollectiveRank::num_elements(int call) const {
  return shape_.calls[call].num_elements + (shape_.calls[call].odd_rank == rank() ? kSlice * shape_.num_ranks : 0);
}

Kind CollectiveRank::kind(int call, int rank) const {
  const ModelCall& made = shape_.calls[call];
  return made.odd_rank == rank ? made.odd_kind.value_or(made.kind) : made.kind;
}

bool CollectiveRank::has_vectors(int call) const {
  return kind(call) == Kind::kOneShot || kind(call) == Kind::kRecursiveDoubling;
}

bool CollectiveRank::scatters(int call) const {
  return kind(call) == Kind::kReduceScatter || kind(call) == Kind::kDirectReduceScatter;
}

bool CollectiveRank::gathers(int call) const {
  return kind(call) == Kind::kAllGather || kind(call) == Kind::kDirectAllGather;
}

bool CollectiveRank::is_direct(int call) const { return kind(call) >= Kind::kDirectAllReduce; }

int CollectiveRank::num_slices(int call) const {
  if (kind(call) == Kind::kOneShotWords || is_direct(call)) return 1;
  const int share = kind(call) == Kind::kOneShot ? num_elements(call) : static_cast<int>(shares(call).size(0));
  return share <= kSlice ? 1 : (share + kSlice - 1) / kSlice;
}

// With the model's kind in place of an algorithm: no call is a refusal.
Announcement CollectiveRank::announcement(int call, int rank) const {
  const bool is_odd = shape_.calls[call].odd_rank == rank;
  return {{static_cast<uint32_t>(kind(call, rank)) << 12,
           static_cast<uint32_t>(shape_.calls[call].num_elements + (is_odd ? 1 : 0)), 0}};
}

Launch CollectiveRank::prepare(int call) {
  return launch("prepare", call, 1, [this, call](int) {
    fill_tensors(call);
    const auto forgets = [](Field field) { return Explorer::running()->is_broken(Mutation::Kind::kForgotten, field); };
    CallState& state = context_.region.state(0);
    const uint64_t newest = newest_epoch(state);
    auto seen = seen_of(state.seen, newest);
    if (seen == Seen::kNothing && forgets(Field::kRefusalText)) seen = Seen::kWords;
    if (seen == Seen::kWords && forgets(Field::kWords)) seen = Seen::kSignals;
    state.seen = with_seen(state.seen, newest, seen);
    if (forgets(Field::kPoison)) {
      atomic_store<Order::kRelaxed, Scope::kSystem>(comm_.region.poison.data, 0u);
      state.has_given_up = 0;
    }
  });
}

void CollectiveRank::fill_tensors(int call) {
  const int64_t first = gathers(call) ? shares(call).offset[rank()] : 0;
  for (int i = 0; i < kMaxElements; ++i) {
    x_[i] = value(rank(), call, static_cast<int>(first) + i);
    out_[i] = -1;
  }
}

template <class Args>
Args CollectiveRank::share_args(int call, int number) const {
  const bool in_place = shape_.calls[call].in_place;
  Args args;
  args.context = context_;
  args.announcement = announcement(call, rank());
  args.slice = number;
  args.x = reinterpret_cast<const std::byte*>(x_);
  args.out = reinterpret_cast<std::byte*>(in_place ? x_ : out_);
  args.shares = shares(call);
  if (scatters(call)) args.out_begin = args.shares.offset[rank()];
  if (gathers(call)) args.x_begin = args.shares.offset[rank()];
  args.extent = {.first = number * int64_t{kSlice}, .most = is_direct(call) ? kMaxElements : kSlice, .chunk = kChunk};
  for (int r = 0; r < shape_.num_ranks; ++r) {
    args.extent.most_chunks = std::max(args.extent.most_chunks, args.extent.num_chunks(args.shares, r));
  }
  return args;
}

template <class Args>
Args CollectiveRank::vector_args(int call, int number) const {
  const int rest = num_elements(call) - number * kSlice;
  Args args;
  args.context = broken_context();
  args.announcement = announcement(call, rank());
  args.slice = number;
  args.x = reinterpret_cast<const std::byte*>(x_) + number * kShareBytes;
  args.out = reinterpret_cast<std::byte*>(shape_.calls[call].in_place ? x_ : out_) + number * kShareBytes;
  args.count = rest < kSlice || kind(call) == Kind::kOneShotWords ? rest : kSlice;
  args.chunk = kChunk;
  args.num_chunks = static_cast<int>((args.count + kChunk - 1) / kChunk);
  return args;
}

// A mutation: every epoch uses the same half of a field.
CollectiveContext CollectiveRank::broken_context() const {
  CollectiveContext context = context_;
  const auto is_one = [](Field field) { return Explorer::running()->is_broken(Mutation::Kind::kOneHalf, field); };
  if (is_one(Field::kAnnouncement)) context.region.announcement.stride[0] = 0;
  if (is_one(Field::kWords)) context.region.words.stride[0] = 0;
  return context;
}

void CollectiveRank::run(int call, int number, int block) {
  const Grid grid{block, shape_.num_blocks};
  switch (kind(call)) {
    case Kind::kOneShot:
      return OneShot::run(vector_args<OneShotArgs>(call, number), grid, Block{}, nullptr);
    case Kind::kOneShotWords:
      return OneShotWords::run(vector_args<OneShotWordsArgs>(call, number), grid, Block{}, nullptr);
    case Kind::kRecursiveDoubling:
      return RecursiveDoubling::run(vector_args<RecursiveDoublingArgs>(call, number), grid, Block{}, nullptr);
    case Kind::kTwoShot:
      return TwoShot::run(share_args<TwoShotArgs>(call, number), grid, Block{}, nullptr);
    case Kind::kCodedTwoShot:
      return CodedTwoShot<kCodec>::run(share_args<CodedTwoShotArgs<kCodec>>(call, number), grid, Block{}, nullptr);
    case Kind::kRing:
      return Ring::run(share_args<RingArgs>(call, number), grid, Block{}, nullptr);
    case Kind::kReduceScatter:
      return ReduceScatter::run(share_args<ReduceScatterArgs>(call, number), grid, Block{}, nullptr);
    case Kind::kAllGather:
      return AllGather::run(share_args<AllGatherArgs>(call, number), grid, Block{}, nullptr);
    case Kind::kDirectAllReduce:
      return DirectAllReduce::run(share_args<DirectAllReduceArgs>(call, number), grid, Block{}, nullptr);
    case Kind::kDirectReduceScatter:
      return DirectReduceScatter::run(share_args<DirectReduceScatterArgs>(call, number), grid, Block{}, nullptr);
    case Kind::kDirectAllGather:
      return DirectAllGather::run(share_args<DirectAllGatherArgs>(call, number), grid, Block{}, nullptr);
  }
}

Launch CollectiveRank::slice(int call, int number) {
  constexpr const char* kNames[] = {
      "one_shot",   "two_shot",    "reduce_scatter",        kGatherLaunch,      "ring", "doubling", kWordsLaunch,
      kCodedLaunch, kDirectLaunch, "direct_reduce_scatter", "direct_all_gather"};
  return launch(kNames[static_cast<int>(kind(call))], call, shape_.num_blocks, [this, call, number](int block) {
    if (block == 0) {
      raise_early(Field::kChunkSignal);
      raise_early(Field::kResultSignal);
    }
    run(call, number, block);
  });
}

Launch CollectiveRank::refuse(int call) {
  return launch(kRefuseCollective, call, 1, [this](int) {
    raise_early(Field::kCallSignal);
    RefuseCollective::run(
        {.context = context_, .announcement = Announcement::of_refusal(), .text = refusal_text(rank())}, Grid{0, 1},
        Block{}, nullptr);
  });
}

// A mutation: raises the signals of a launch before it does the work that they guard.
void CollectiveRank::raise_early(Field field) const {
  if (!Explorer::running()->is_broken(Mutation::Kind::kRaisedEarly, field)) return;
  const CollectiveRegion& region = context_.region;
  const uint64_t epoch = newest_epoch(region.state(0)) + 1;
  const int half = static_cast<int>(epoch % 2);
  for (int r = 0; r < shape_.num_ranks; ++r) {
    const auto raise = [&](Signal* local) {
      atomic_store<Order::kRelease, Scope::kSystem>(&context_.heap.peer(r, local)->word, Signal::pack(epoch, 0));
    };
    if (field == Field::kCallSignal) raise(region.call_signal.at(half, rank()));
    for (int i = 0; i < kSlice / kChunk; ++i) {
      if (field == Field::kChunkSignal) raise(region.chunk_signal.at(half, rank(), i));
      if (field == Field::kResultSignal) raise(region.result_signal.at(half, rank(), i));
    }
  }
}

// ---- what has arrived

Launch CollectiveRank::check(int call) {
  return launch("check", call, 1, [this, call](int) {
    const int late = shape_.calls[call].late_rank;
    if (late >= 0) {  // the late rank may still take part in the first call that it missed
      if (call > 0 && shape_.calls[call - 1].late_rank >= 0) compare_left(late);
    } else if (shape_.calls[call].odd_rank >= 0 || shape_.calls[call].refusing_rank >= 0) {
      compare_report(call);
    } else {
      compare(call);
    }
  });
}

void CollectiveRank::compare(int call) const {
  for (const Report* report : {&reports_->failure, &reports_->refusal}) {
    if (atomic_load<Order::kAcquire, Scope::kSystem>(&report->is_complete) != 0u) fail("there is a report");
  }
  const Shares cut = shares(call);
  const int64_t own = cut.offset[rank()];
  const float* result = shape_.calls[call].in_place ? x_ : out_;
  const int64_t first = scatters(call) ? own : 0;
  const int64_t end = scatters(call) ? cut.offset[rank() + 1] : num_elements(call);
  for (int64_t i = first; i < end; ++i) {
    float expected = 0;
    for (int r = 0; r < shape_.num_ranks; ++r) {
      const bool counts = !gathers(call) || (i >= cut.offset[r] && i < cut.offset[r + 1]);
      if (counts) expected += value(r, call, static_cast<int>(i));
    }
    // Of each contribution, and of the result, a step at most: a 128th of the largest value, rounded up.
    const float bound = is_coded(call) ? expected / 60 : 0;
    if (std::abs(result[i - first] - expected) > bound) {
      fail("element " + std::to_string(i) + " is " + std::to_string(result[i - first]) + ", not " +
           std::to_string(expected));
    }
  }
}

void CollectiveRank::compare_report(int call) {
  const ModelCall& made = shape_.calls[call];
  const bool is_refusal = made.refusing_rank >= 0;
  const int peer = is_refusal ? made.refusing_rank : made.odd_rank != rank() ? made.odd_rank : rank() == 0;
  compare_refusal(peer, is_refusal);
  if (!is_refusal) {
    const Announcement theirs = announcement(call, peer), own = announcement(call, rank());
    if (reports_->refusal.awaited != collective_kind::kDisagreement) fail("the report is of a refusal");
    for (int i = 0; i < Announcement::kWords; ++i) {
      if (reports_->refusal.refusal.word[i] != theirs.word[i]) fail("the announcement of the peer is wrong");
      if (reports_->refusal.refusal.word[Announcement::kWords + i] != own.word[i])
        fail("this rank's announcement is wrong");
    }
  }
  take_refusal_report();
}

}  // namespace moe_a2a
