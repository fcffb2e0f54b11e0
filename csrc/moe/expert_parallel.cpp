#include "moe/expert_parallel.h"

#include <algorithm>
#include <utility>

#include "moe/moe_kernels.h"
#include "moe/vocabulary.h"

namespace moe_a2a {
namespace {

const char* name_of(DispatchHandle::Stage stage) {
  using Stage = DispatchHandle::Stage;
  switch (stage) {
    case Stage::kSent:
      return "sent, not yet received";
    case Stage::kReceived:
      return "received";
    case Stage::kCombineSent:
      return "combine sent";
    case Stage::kRefused:
      return "closed, since its dispatch was refused,";
    case Stage::kCombined:
    case Stage::kClosed:
      break;
  }
  return "closed";
}

// Calls f(args) with the arguments of the combine_send that the input needs.
template <class F>
void with_kind(const CombineSendArgs& send, const DispatchHandle& handle, const CombineInput& input, const F& f) {
  if (input.simulated) return f(SimulatedCombineSendArgs{send, handle.layout, *input.simulated});
  if (input.codec != LineCodec::kNone) return f(CodedCombineSendArgs{send, input.codec});
  f(send);
}

}  // namespace

size_t ExpertParallel::nbytes_for(const MoeConfig& config) {
  Context context;
  context.config = config;
  const RegionSize size = place_region(context, nullptr, nullptr);
  return size.symmetric_bytes + size.local_bytes;
}

ExpertParallel::ExpertParallel(std::shared_ptr<Communicator> comm, const MoeConfig& config)
    : Client(comm->member(), kMoeVocabulary, context_, comm->ordered()),
      comm_(std::move(comm)),
      product_trace_(*device_),
      buffers_(config.num_buffers) {
  context_.config = config;
  for (const auto& family : {dispatch_kernels, local_kernels, combine_kernels, coded_combine_kernels,
                             product_combine_kernels, simulated_experts_kernels, link_floor_kernels}) {
    device_->add(family(member_.target));
  }
  allocate(
      {agreed("num_experts", config.num_experts), agreed("num_topk", config.num_topk), agreed("hidden", config.hidden),
       agreed("num_buffers", config.num_buffers), agreed("num_max_tokens_per_rank", config.num_max_tokens_per_rank),
       agreed("num_max_ll_tokens", config.num_max_ll_tokens), agreed("dtype", name_of(config.dtype))},
      [&](std::byte* symmetric, std::byte* local) { return place_region(context_, symmetric, local); });
  link(comm_->poison_link());
}

void ExpertParallel::after_close() {
  buffers_.close();
  raise_bad_routing();
}

// ---- buffers and handles

void ExpertParallel::require_own(const DispatchHandle& handle, const char* call) const {
  require_open();
  if (handle.owner != this) {
    throw std::runtime_error(std::string(call) +
                             " got a handle of another ExpertParallel; pass the one that this object's dispatch "
                             "returned");
  }
}

void ExpertParallel::require(const DispatchHandle& handle, std::initializer_list<Stage> stages,
                             const char* call) const {
  require_own(handle, call);
  const Stage stage = handle.stage;
  if (std::find(stages.begin(), stages.end(), stage) != stages.end()) return;
  throw std::runtime_error(std::string(call) + " got a handle that is " + name_of(stage) + " on rank " +
                           std::to_string(config().rank) +
                           (handle.is_open() ? "; call the halves in order"
                                             : "; a handle serves one combine, pass that of the newest dispatch"));
}

// A dropped or refused holder is released first: see BufferRing::next().
int ExpertParallel::find_buffer(const LaunchPlace& place) {
  const int buffer = buffers_.next();
  if (buffer < 0) return buffer;
  if (const auto holder = buffers_.holder(buffer)) release(*holder, place);
  return buffer;
}

int ExpertParallel::next_buffer(const LaunchPlace& place) {
  if (const int buffer = find_buffer(place); buffer >= 0) return buffer;
  const int n = config().num_buffers;
  throw std::runtime_error("dispatch: " + std::to_string(n) + " handles are open on rank " +
                           std::to_string(config().rank) + " and num_buffers=" + std::to_string(n) +
                           "; combine() or release() one first, or pass a larger num_buffers");
}

int64_t ExpertParallel::max_quantized_row_bytes() const {
  return moe_a2a::max_quantized_row_bytes(member_.target, device_->max_shared_bytes());
}

int ExpertParallel::blocks(const LaunchPlace& place, int by_table) const {
  const int wanted = place.num_blocks > 0 ? place.num_blocks : by_table > 0 ? by_table : device_->default_blocks();
  return resident_blocks(wanted, share_of_device());
}

// Codecs take every block that this object may have, since their loops wait for loads. (4 H100, 4096 tokens, q8: 597 us
// with 64 blocks, 478 with 96, 448 with 132.)
int ExpertParallel::combine_blocks(int num_tokens, const CombineInput& input, const LaunchPlace& place) const {
  if (input.codec == LineCodec::kNone || device_->is_synchronous()) return combine_blocks(num_tokens, place);
  return blocks(place, share_of_device());
}

// For a kernel whose blocks wait for nothing: by default the GPU's maximum, whatever this object's share.
int ExpertParallel::independent_blocks(const LaunchPlace& place) const {
  return device_->is_synchronous() || place.num_blocks > 0 ? blocks(place, 0) : device_->max_blocks();
}

bool ExpertParallel::launches_halves() const { return device_->is_synchronous() || device_->max_blocks() < 2; }

bool ExpertParallel::allows_vectors(const Rows& rows) const {
  return (rows.address() | rows.stride) % 16 == 0 || !device_->needs_aligned_vectors();
}

// ---- the steps

DispatchSendArgs ExpertParallel::send_args(const DispatchInput& input, const DispatchHandle& handle,
                                           const LaunchPlace& place) const {
  return {.context = context_of(handle),
          .buffer = handle.buffer,
          .number = for_kernels(handle.number, place),
          .num_tokens = input.num_tokens,
          .topk_idx = input.topk_idx,
          .topk_weights = input.topk_weights,
          .x = input.x,
          .x_scales = input.x_scales,
          .format = input.format,
          .quantize = input.quantize,
          .vector_rows = allows_vectors(input.x)};
}

DispatchRecvArgs ExpertParallel::recv_args(const DispatchHandle& handle, const DispatchNumber& number) const {
  return {.context = context_of(handle),
          .buffer = handle.buffer,
          .number = number.number,
          .layout = handle.layout,
          .expert_alignment = handle.expert_alignment,
          .format = handle.format};
}

std::shared_ptr<DispatchHandle> ExpertParallel::make_handle(const DispatchInput& input, int buffer) const {
  auto handle = std::make_shared<DispatchHandle>();
  handle->owner = this;
  handle->buffer = buffer;
  handle->number = buffers_.number_of_next(buffer);
  handle->num_tokens = input.num_tokens;
  handle->num_max_tokens_per_rank =
      input.num_max_tokens_per_rank > 0 ? input.num_max_tokens_per_rank : config().num_max_tokens_per_rank;
  handle->format = input.format;
  return handle;
}

std::shared_ptr<DispatchHandle> ExpertParallel::dispatch_send(const DispatchInput& input, const LaunchPlace& place) {
  const CallGate::Turn turn = gate_.enter();
  require_open();
  raise_waits();
  const int buffer = next_buffer(place), num_blocks = dispatch_blocks(input.num_tokens, place);
  auto handle = make_handle(input, buffer);
  launch(send_args(input, *handle, place), num_blocks, place.stream);
  if (device_->is_synchronous()) {
    try {
      raise_waits();
    } catch (const PeerRefused&) {  // a peer has no buffer: nothing was sent
      buffers_.pass();
      throw;
    }
  }
  buffers_.take(buffer, handle);
  after_launch();
  return handle;
}

void ExpertParallel::dispatch_recv(DispatchHandle& handle, Layout layout, int expert_alignment,
                                   const LaunchPlace& place) {
  const CallGate::Turn turn = gate_.enter();
  require(handle, {Stage::kSent}, "dispatch_recv");
  handle.layout = layout;
  handle.expert_alignment = expert_alignment;
  launch(recv_args(handle, for_kernels(handle.number, place)), dispatch_blocks(handle.num_tokens, place), place.stream);
  handle.stage = Stage::kReceived;
  try {
    after_launch();
  } catch (const PeerRefused&) {
    release(handle, place);  // the epoch has passed on every rank; the next dispatch is a new one
    throw;
  } catch (const BadRouting& error) {
    release(handle, place, error.what());  // dispatch() returns no handle; the peers get the credit and the reason
    throw;
  }
}

std::shared_ptr<DispatchHandle> ExpertParallel::dispatch(const DispatchInput& input, Layout layout,
                                                         int expert_alignment, const LaunchPlace& place) {
  const CallGate::Turn turn = gate_.enter();
  if (launches_halves()) {
    auto handle = dispatch_send(input, place);
    dispatch_recv(*handle, layout, expert_alignment, place);
    return handle;
  }
  require_open();
  raise_waits();
  const int buffer = next_buffer(place), num_blocks = std::max(2, dispatch_blocks(input.num_tokens, place));
  auto handle = make_handle(input, buffer);
  handle->layout = layout;
  handle->expert_alignment = expert_alignment;
  handle->stage = Stage::kReceived;
  const DispatchSendArgs send = send_args(input, *handle, place);
  launch(
      DispatchArgs{
          .send = send, .recv = recv_args(*handle, send.number), .num_send_blocks = dispatch_senders(num_blocks)},
      num_blocks, place.stream);
  buffers_.take(buffer, handle);
  return handle;
}

int64_t ExpertParallel::num_positions(const DispatchHandle& handle) const {
  const MoeConfig config = config_of(handle);
  return handle.layout == Layout::kMasked ? config.num_local_experts * config.row_capacity()
                                          : route_list_capacity(config, handle.expert_alignment);
}

void ExpertParallel::gather_rows(const DispatchHandle& handle, void* expert_x, float* expert_x_scales,
                                 bool scales_by_column, const LaunchPlace& place) {
  const CallGate::Turn turn = gate_.enter();
  require(handle, {Stage::kReceived}, "the expert layout");
  launch_alone(GatherRowsArgs{.context = context_of(handle),
                              .buffer = handle.buffer,
                              .layout = handle.layout,
                              .row_dtype = config().row_dtype(handle.format),
                              .num_positions = num_positions(handle),
                              .expert_x = static_cast<std::byte*>(expert_x),
                              .expert_x_scales = expert_x_scales,
                              .scales_by_column = scales_by_column},
               place);
}

void ExpertParallel::recv_topk(const DispatchHandle& handle, RecvTopkArgs args, const LaunchPlace& place) {
  const CallGate::Turn turn = gate_.enter();
  require(handle, {Stage::kReceived}, "recv_topk");
  args.context = context_of(handle);
  args.buffer = handle.buffer;
  launch_alone(args, place);
}

void ExpertParallel::set_term_weights(const DispatchHandle& handle, const float* weights, const LaunchPlace& place) {
  const CallGate::Turn turn = gate_.enter();
  require(handle, {Stage::kReceived}, "set_term_weights");
  launch_alone(TermWeightsArgs{.context = context_of(handle), .buffer = handle.buffer, .weights = weights}, place);
}

void ExpertParallel::weighted_grads(const DispatchHandle& handle, const WeightedRows& y, void* grad_y,
                                    float* grad_weights, const LaunchPlace& place) {
  const CallGate::Turn turn = gate_.enter();
  require(handle, {Stage::kReceived}, "a combine's backward pass");
  const Rows target = {static_cast<std::byte*>(grad_y), config().row_bytes(config().dtype)};
  launch_alone(WeightedGradsArgs{.context = context_of(handle),
                                 .buffer = handle.buffer,
                                 .num_positions = y.num_rows,
                                 .y = y.rows,
                                 .weights = y.weights,
                                 .grad_y = static_cast<std::byte*>(grad_y),
                                 .grad_weights = grad_weights,
                                 .vector_rows = allows_vectors(y.rows) && allows_vectors(target)},
               place);
}

void ExpertParallel::simulated_experts(const DispatchHandle& handle, const ExpertScales& scales, void* sums,
                                       const LaunchPlace& place) {
  const CallGate::Turn turn = gate_.enter();
  require(handle, {Stage::kReceived}, "simulated_experts");
  const Rows rows = {static_cast<std::byte*>(sums), config().row_bytes(config().dtype)};
  launch_alone(SimulatedExpertsArgs{.context = context_of(handle),
                                    .buffer = handle.buffer,
                                    .layout = handle.layout,
                                    .scales = scales,
                                    .sums = static_cast<std::byte*>(sums),
                                    .vector_rows = allows_vectors(rows) && allows_vectors(scales)},
               place);
}

CombineSendArgs ExpertParallel::send_args(const DispatchHandle& handle, const CombineInput& input) const {
  return {.context = context_of(handle),
          .buffer = handle.buffer,
          .y = input.y,
          .num_y_rows = input.num_y_rows,
          .presummed = input.presummed,
          .y_in_heap = owns(input.y.data),
          .note = buffers_.credit_note(handle),
          .vector_rows = input.simulated ? allows_vectors(*input.simulated) : allows_vectors(input.y),
          .sum_index = input.sum_index};
}

CombineRecvArgs ExpertParallel::recv_args(const DispatchHandle& handle, void* combined_x,
                                          const LaunchPlace& place) const {
  const Rows rows = {static_cast<std::byte*>(combined_x), config().row_bytes(config().dtype)};
  return {.context = context_of(handle),
          .buffer = handle.buffer,
          .num_tokens = handle.num_tokens,
          .number = for_kernels(handle.number, place).number,
          .attempt = handle.attempt,
          .seen = handle.seen,
          .combined_x = static_cast<std::byte*>(combined_x),
          .vector_rows = allows_vectors(rows)};
}

void ExpertParallel::finish_combine(DispatchHandle& handle) {
  handle.stage = device_->is_synchronous() ? Stage::kClosed : Stage::kCombined;
  buffers_.give_back(handle.buffer);
}

void ExpertParallel::combine_send(DispatchHandle& handle, const CombineInput& input, const LaunchPlace& place) {
  const CallGate::Turn turn = gate_.enter();
  require(handle, {Stage::kReceived}, "combine_send");
  raise_waits();
  const int num_blocks = combine_blocks(handle.num_tokens, input, place);
  with_kind(send_args(handle, input), handle, input, [&](const auto& args) { launch(args, num_blocks, place.stream); });
  handle.stage = Stage::kCombineSent;
  after_launch();
}

void ExpertParallel::combine_recv(DispatchHandle& handle, void* combined_x, const LaunchPlace& place) {
  const CallGate::Turn turn = gate_.enter();
  require(handle, {Stage::kCombineSent}, "combine_recv");
  if (handle.keeps_own_sums) {
    throw std::runtime_error("combine_recv got a handle whose combine was refused on rank " +
                             std::to_string(config().rank) + "; call combine() again, with the same y");
  }
  const int num_blocks = combine_blocks(handle.num_tokens, place);
  buffers_.expect_refusal(handle.buffer);
  launch(recv_args(handle, combined_x, place), num_blocks, place.stream);
  try {
    after_launch();
  } catch (const PeerRefused& refused) {
    if (refused.is_final) {
      finish_combine(handle);
    } else {
      handle.note_refusal(refused.peer, refused.count);  // what this rank has sent stays sent; the call may be retried
    }
    throw;
  }
  finish_combine(handle);
}

// The repeated call must leave to combine_recv what the refused one has not sent.
void ExpertParallel::keep_own_sums(DispatchHandle& handle, const CombineSendArgs& send) {
  const bool keeps = send.can_keep_own_sums();
  if (send.is_sent && handle.keeps_own_sums && !keeps) {
    throw std::invalid_argument("combine, repeated after a refusal, got another y on rank " +
                                std::to_string(config().rank) +
                                "; pass the y of the refused call: presummed, its rows aligned to 16 bytes");
  }
  if (!send.is_sent) handle.keeps_own_sums = keeps;
}

void ExpertParallel::combine(DispatchHandle& handle, const CombineInput& input, void* combined_x,
                             const LaunchPlace& place) {
  const CallGate::Turn turn = gate_.enter();
  require(handle, {Stage::kReceived, Stage::kCombineSent}, "combine");
  if (launches_halves()) {
    if (handle.stage == Stage::kReceived) combine_send(handle, input, place);
    return combine_recv(handle, combined_x, place);
  }
  raise_waits();
  const int num_blocks = std::max(2, combine_blocks(handle.num_tokens, input, place));
  CombineSendArgs send = send_args(handle, input);
  send.is_sent = handle.stage == Stage::kCombineSent;
  keep_own_sums(handle, send);
  buffers_.expect_refusal(handle.buffer);
  const CombineRecvArgs recv = recv_args(handle, combined_x, place);
  const int num_senders = input.codec != LineCodec::kNone
                              ? coded_combine_senders(num_blocks, input.presummed, config().num_ranks)
                              : combine_senders(num_blocks, input.presummed, config().num_ranks);
  with_kind(send, handle, input, [&]<class SendArgs>(const SendArgs& args) {
    launch(BothCombineArgs<SendArgs>{args, recv, num_senders}, num_blocks, place.stream);
  });
  finish_combine(handle);
}

}  // namespace moe_a2a
