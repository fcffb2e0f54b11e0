// Compiled with -fsanitize=thread, see compiler_hooks.cpp: the kernels are instantiated only here. What a rank does
// between them is in model_experts.cpp.
#include "model_rank.h"

#include <cstdlib>
#include <cstring>

#include "comm/align_clocks.h"
#include "comm/goodbye.h"
#include "comm/traced.h"
#include "model_values.h"
#include "moe/combine/combine.h"
#include "moe/combine/combine_send_stored.h"
#include "moe/dispatch/dispatch.h"
#include "moe/experts/simulated_combine.h"
#include "moe/notices.h"

namespace moe_a2a {
namespace {

constexpr LineCodec kCodec = LineCodec::kQ8;  // of coded calls

using SharedMemory = std::vector<std::max_align_t>;  // of one block, kept between launches

template <class Kernel>
void run_kernel(SharedMemory& shared, const typename Kernel::Args& args, int block, int num_blocks) {
  const size_t units = shared_bytes_of<Kernel>(args) / sizeof(std::max_align_t) + 1;
  if (shared.size() < units) shared.resize(units);
  Kernel::run(args, Grid{block, num_blocks}, Block{}, reinterpret_cast<std::byte*>(shared.data()));
}

}  // namespace

MoeConfig config_of(const Shape& shape, int rank) {
  return {.rank = rank,
          .num_ranks = shape.num_ranks,
          .num_experts = shape.num_experts,
          .num_topk = shape.num_topk,
          .hidden = shape.hidden,
          .num_max_tokens_per_rank = shape.num_max_tokens,
          .num_buffers = shape.num_buffers,
          .dtype = DType::kFloat32,
          .num_max_ll_tokens = shape.num_max_ll_tokens,
          .max_ll_row_tokens = shape.max_ll_row_tokens,
          .max_ll_quantized_row_tokens = shape.max_ll_row_tokens,
          .max_ll_sum_tokens = shape.max_ll_sum_tokens};
}

RegionSize size_of(const Shape& shape) {
  CommContext comm_context;
  const RegionSize comm = place_region(comm_context, shape.num_ranks, nullptr, nullptr);
  Context context;
  context.config = config_of(shape, 0);
  const RegionSize moe = place_region(context, nullptr, nullptr);
  const size_t outputs = context.config.route_capacity() * (shape.hidden * sizeof(float) + sizeof(uint32_t));
  const size_t lines = (outputs + 127) / 128 * 128;
  return {comm.symmetric_bytes + moe.symmetric_bytes, comm.local_bytes + moe.local_bytes + lines, moe.layout_digest};
}

ModelRank::ModelRank(const Shape& shape, int rank, std::byte* symmetric, std::byte* local, Reports* reports)
    : ExploredRank(context_, size_of(shape), local, reports), shape_(shape) {
  context_.config = config_of(shape, rank);
  const RegionSize comm = connect(rank, shape.num_ranks, symmetric);
  const RegionSize moe = place_region(context_, own_heap_ + comm.symmetric_bytes, local + comm.local_bytes);
  y_ = reinterpret_cast<float*>(local + comm.local_bytes + moe.local_bytes);
  stored_tiles_ = reinterpret_cast<uint32_t*>(y_ + context_.config.route_capacity() * shape.hidden);
  const int num_local = context_.config.num_local_experts;
  for (int e = 0; e < num_local; ++e) scales_.push_back(expert_factor(rank * num_local + e));
  for (int call = 0; call < shape.num_calls; ++call) {
    for (int r = 0; r < shape.num_ranks; ++r) {
      Input input{.choices = shape.routing(r, call), .topk_idx = {}, .topk_weights = {}, .x = {}};
      for (int t = 0; t < static_cast<int>(input.choices.size()); ++t) {
        for (int k = 0; k < shape.num_topk; ++k) {
          input.topk_idx.push_back(input.choices[t][k]);
          input.topk_weights.push_back(weight_value(r, t, k));
        }
        for (int c = 0; c < shape.hidden; ++c) input.x.push_back(x_value(r, t, call, c));
      }
      inputs_.push_back(std::move(input));
    }
  }
  combined_.resize(static_cast<size_t>(shape.num_max_tokens) * shape.hidden);
}

void ModelRank::reset() {
  clear();
  attempt_ = 1;
  noted_refusal_ = false;
  if (shape_.first_epoch == 0) return;
  reset_ll_words();
  const Signal old{Signal::pack(shape_.first_epoch, 0)};
  const MoeRegion& region = context_.region;
  for (int b = 0; b < shape_.num_buffers; ++b) {
    region.epoch(b) = shape_.first_epoch;
    for (int r = 0; r < shape_.num_ranks; ++r) {
      region.dispatch_credit(b, r) = region.combine_refusal(b, r) = region.table_signal(b, r, 0) = old;
      for (int t = 0; t < shape_.num_max_tokens; ++t) region.row_signal(b, r, t) = region.combine_signal(b, r, t) = old;
    }
  }
}

void ModelRank::reset_ll_words() {
  const LlWord old{.data = {}, .stamp = ll_stamp(shape_.first_epoch)};
  const MoeConfig& config = context_.config;
  const int64_t num_tokens = int64_t{shape_.num_buffers} * shape_.num_ranks * shape_.num_max_ll_tokens;
  const auto fill = [&](std::byte* words, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += sizeof(old)) std::memcpy(words + i, &old, sizeof(old));
  };
  fill(context_.region.ll_choices.data, num_tokens * config.ll_choices_stride());
  fill(context_.region.ll_row.data, num_tokens * config.ll_row_stride());
  fill(context_.region.ll_combine_row.data, num_tokens * config.ll_row_stride());
}

bool ModelRank::sums_return_ll(int call) const {
  bool ll = true;
  for (int r = 0; r < shape_.num_ranks; ++r) ll &= context_.config.returns_ll(num_tokens(r, call));
  return ll;
}

// ---- the kernels, launched as csrc/moe launches them

DispatchSendArgs ModelRank::dispatch_send_args(int call) const {
  const Input& in = input(rank(), call);
  const Rows x = {reinterpret_cast<const std::byte*>(in.x.data()), shape_.hidden * int64_t{sizeof(float)}};
  return {.context = context(call),
          .buffer = buffer(call),
          .num_tokens = num_tokens(call),
          .topk_idx = {in.topk_idx.data(), false},
          .topk_weights = in.topk_weights.data(),
          .x = x,
          .x_scales = x,
          .format = format(call)};
}

DispatchRecvArgs ModelRank::dispatch_recv_args(int call) const {
  return {.context = context(call), .buffer = buffer(call), .format = format(call)};
}

CombineSendArgs ModelRank::combine_send_args(int call) const {
  return {.context = context(call),
          .buffer = buffer(call),
          .y = {reinterpret_cast<const std::byte*>(y_), shape_.hidden * int64_t{sizeof(float)}},
          .num_y_rows = context_.config.route_capacity(),
          .presummed = shape_.presummed};
}

CombineRecvArgs ModelRank::combine_recv_args(int call) {
  return {.context = context(call),
          .buffer = buffer(call),
          .num_tokens = num_tokens(call),
          .attempt = attempt_,
          .combined_x = reinterpret_cast<std::byte*>(combined_.data())};
}

Launch ModelRank::dispatch_send(int call) {
  const char* name = is<SmallBatch>(rank(), call)    ? kSmallSend
                     : is<MediumBatch>(rank(), call) ? kMediumSend
                                                     : "dispatch_send";
  return launch(name, call, shape_.num_blocks, [this, call](int block) {
    if (block == 0) raise_early({Field::kTableSignal, Field::kRowSignal}, call);
    run_kernel<DispatchSend>(shared_[block], dispatch_send_args(call), block, shape_.num_blocks);
  });
}

Launch ModelRank::dispatch_recv(int call) {
  const char* name = all_others_are<SmallBatch>(call)    ? kSmallRecv
                     : all_others_are<MediumBatch>(call) ? kMediumRecv
                                                         : "dispatch_recv";
  return launch(name, call, shape_.num_blocks, [this, call](int block) {
    run_kernel<DispatchRecv>(shared_[block], dispatch_recv_args(call), block, shape_.num_blocks);
  });
}

Launch ModelRank::combine_send(int call) {
  return launch("combine_send", call, shape_.num_blocks, [this, call](int block) {
    if (block == 0) raise_early({Field::kCombineSignal}, call);
    const CombineSendArgs args = combine_send_args(call);
    if (shape_.simulated) {
      run_kernel<SimulatedCombineSend>(shared_[block], {args, Layout::kRows, scales()}, block, shape_.num_blocks);
    } else if (is_coded(call)) {
      run_kernel<CodedCombineSend>(shared_[block], {args, kCodec}, block, shape_.num_blocks);
    } else {
      run_kernel<CombineSend>(shared_[block], args, block, shape_.num_blocks);
    }
  });
}

Launch ModelRank::product_combine_send(int call) {
  return launch("product_combine_send", call, 2, [this, call](int block) {
    if (block == 0) store_tiles(call);
    const CombineSendArgs args = combine_send_args(call);
    SharedMemory& shared = shared_[block];
    shared.resize(CombineSendStored::plan(args).bytes / sizeof(std::max_align_t) + 1);
    CombineSendStored::send(args, {stored_tiles_, kTilesOfARow}, Grid{block, 2}, Block{},
                            reinterpret_cast<std::byte*>(shared.data()));
  });
}

Launch ModelRank::zero_counts(int call) {
  return launch("zero the counts", call, 1, [this](int) {
    for (int i = 0; i < context_.config.route_capacity(); ++i) {
      atomic_store<Order::kRelaxed, Scope::kDevice>(stored_tiles_ + i, 0u);
    }
  });
}

Launch ModelRank::combine_recv(int call) {
  return launch("combine_recv", call, shape_.num_blocks, [this, call](int block) {
    run_kernel<CombineRecv>(shared_[block], combine_recv_args(call), block, shape_.num_blocks);
  });
}

Launch ModelRank::dispatch(int call) {
  return launch("dispatch", call, 2, [this, call](int block) {
    if (block == 0) raise_early({Field::kTableSignal, Field::kRowSignal}, call);
    run_kernel<Dispatch>(shared_[block],
                         {.send = dispatch_send_args(call), .recv = dispatch_recv_args(call), .num_send_blocks = 1},
                         block, 2);
  });
}

Launch ModelRank::combine(int call) {
  Launch combine = launch("combine", call, 2, [this, call](int block) {
    if (block == 0) raise_early({Field::kCombineSignal}, call);
    const CombineSendArgs send = combine_send_args(call);
    if (shape_.simulated) {
      const SimulatedCombineSendArgs simulated{send, Layout::kRows, scales()};
      run_kernel<SimulatedCombine>(shared_[block], {simulated, combine_recv_args(call), 1}, block, 2);
    } else if (is_coded(call)) {
      run_kernel<CodedCombine>(shared_[block], {{send, kCodec}, combine_recv_args(call), 1}, block, 2);
    } else {
      run_kernel<Combine>(shared_[block], {send, combine_recv_args(call), 1}, block, 2);
    }
  });
  // Both blocks send sums that travel as LL words.
  combine.num_counted_blocks = sums_return_ll(call) ? 2 : 1;
  return combine;
}

Launch ModelRank::release(int call) {
  return launch("release", call, 1, [this, call](int block) {
    run_kernel<Release>(shared_[block], {.context = context_, .buffer = buffer(call)}, block, 1);
  });
}

Launch ModelRank::refuse_dispatch(int call) {
  return launch("refuse_dispatch", call, 1, [this, call](int block) {
    raise_early({Field::kTableSignal}, call);
    run_kernel<RefuseDispatch>(shared_[block],
                               {.context = context_, .buffer = buffer(call), .text = refusal_text(rank())}, block, 1);
  });
}

Launch ModelRank::refuse_combine(int call, uint32_t attempt) {
  return launch("refuse_combine", call, 1, [this, call, attempt](int block) {
    raise_early({Field::kCombineRefusal}, call);
    run_kernel<RefuseCombine>(shared_[block],
                              {.context = context_,
                               .buffer = buffer(call),
                               .count = RefusalCount::pack(attempt, 0),
                               .text = refusal_text(rank())},
                              block, 1);
    attempt_ = attempt + 1;
  });
}

Launch ModelRank::goodbye() {
  return launch("goodbye", -1, 1,
                [this](int block) { run_kernel<Goodbye>(shared_[block], {.context = context_}, block, 1); });
}

Launch ModelRank::align_clocks() {
  return launch("align_clocks", -1, 1, [this](int block) {
    run_kernel<AlignClocks>(shared_[block], {.context = comm_, .num_rounds = 2}, block, 1);
  });
}

// A mutation that hooks of atomics cannot make: the signal precedes the work.
void ModelRank::raise_early(std::initializer_list<Field> fields, int call) const {
  const MoeRegion& region = context_.region;
  const RankSet all = RankSet::all(shape_.num_ranks);
  const int b = buffer(call);
  const uint64_t epoch = region.epoch(b);
  const uint32_t header = BatchHeader::pack(context(call).config, num_tokens(call), RowFormat::kPlain);
  const auto raise = [&](Signal* signal, uint64_t value, uint32_t payload = 0) {
    signal_many(context_.heap, all, signal, value, payload);
  };
  for (const Field field : fields) {
    if (!Explorer::running()->is_broken(Mutation::Kind::kRaisedEarly, field)) continue;
    if (field == Field::kTableSignal) raise(region.table_signal.at(b, rank(), 0), epoch + 1, header);
    if (field == Field::kDispatchCredit) raise(region.dispatch_credit.at(b, rank()), epoch);
    if (field == Field::kCombineRefusal) raise(region.combine_refusal.at(b, rank()), epoch, attempt_);
    for (int i = 0; i < shape_.num_max_tokens; ++i) {
      if (field == Field::kRowSignal) raise(region.row_signal.at(b, rank(), i), epoch + 1);
      if (field == Field::kCombineSignal) raise(region.combine_signal.at(b, rank(), i), epoch);
    }
  }
}

// ---- refusals and waits that gave up

Launch ModelRank::expect_refusal(int peer, bool check_text) {
  return launch("expect_refusal", -1, 1, [=, this](int) { take_refusal(peer, check_text); });
}

void ModelRank::take_refusal(int peer, bool check_text) {
  compare_refusal(peer, check_text);
  take_refusal_report();
  ++attempt_;
}

Launch ModelRank::note_refusal(int peer) {
  return launch("note_refusal", -1, 1, [this, peer](int) {
    noted_refusal_ = reports_->refusal.is_complete != 0;
    if (noted_refusal_) take_refusal(peer, true);
  });
}

Launch ModelRank::combine_recv_again(int call) {
  Launch again = combine_recv(call);
  again.body = [this, body = again.body](int block) {
    if (noted_refusal_) body(block);
  };
  return again;
}

Launch ModelRank::expect_left(int culprit) {
  return launch("expect_left", -1, 1, [this, culprit](int) { compare_left(culprit); });
}

Launch ModelRank::watch_report(int culprit) {
  return launch("host watches", -1, 1, [this, culprit](int) {
    while (atomic_load<Order::kRelaxed, Scope::kSystem>(&reports_->failure.is_complete) != 1u) pause();
    compare_left(culprit);
  });
}

void ModelRank::compare_clocks() const {
  for (int r = 0; r < shape_.num_ranks; ++r) {
    const ClockReading& reading = comm_.region.clock_reading(r);
    const int64_t wrong_by = reading.offset - static_cast<int64_t>(clock_offset(r) - clock_offset(rank()));
    if (static_cast<uint64_t>(std::abs(wrong_by)) > (reading.round_trip + 1) / 2 || reading.round_trip > 1000) {
      fail("the clock of rank " + std::to_string(r) + " is wrong by " + std::to_string(wrong_by) + ", said to be " +
           std::to_string(reading.round_trip / 2));
    }
  }
}

Launch ModelRank::reuse_heap() {
  return launch("reuse_heap", -1, 1, [this](int) {
    for (size_t i = 0; i < size_.symmetric_bytes; i += sizeof(uint64_t)) reinterpret_cast<uint64_t&>(own_heap_[i]) = i;
  });
}

}  // namespace moe_a2a
