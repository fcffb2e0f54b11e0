#include "collectives/collectives.h"

#include <algorithm>

#include "collectives/collective_kernels.h"
#include "collectives/direct.h"
#include "collectives/one_shot_words.h"
#include "collectives/recursive_doubling.h"
#include "collectives/refuse_collective.h"
#include "collectives/ring.h"
#include "collectives/two_shot.h"
#include "comm/fnv1a.h"
#include "comm/refusal_text.h"

namespace moe_a2a {
namespace {

// On the CPU slices are fastest if their landings (two halves on every rank) stay in the cores' private caches. 4 ranks
// on 2 cores, us for 4, 16 and 64 MiB: 1701, 7222, 31897; with a workspace of 2 MiB: 2064, 8563, 35283.
constexpr int64_t kMaxCpuWorkspace = 256 << 10;

constexpr int64_t kTensorAlignment = 512;  // as PyTorch's

// Bytes of an element in a landing place that holds two lines: its contribution, and the result.
constexpr int kCodedSize = 2 * 2;

uint64_t digest_of(uint64_t first, uint64_t second) {
  Fnv1a hash;
  hash.add(first);
  hash.add(second);
  return hash.digest;
}

}  // namespace

Collectives::Collectives(std::shared_ptr<Communicator> comm, int64_t max_nbytes, int64_t symmetric_nbytes,
                         int num_blocks)
    : Client(comm->member(), kCollectiveVocabulary, context_, comm->ordered(), num_blocks),
      comm_(std::move(comm)),
      symmetric_nbytes_(symmetric_nbytes),
      num_blocks_(num_blocks) {
  for (const auto& family : {collective_kernels, coded_collective_kernels}) device_->add(family(member_.target));
  const int num_ranks = member_.num_ranks;
  share_bytes_ =
      share_bytes_for(device_->is_synchronous() ? std::min(max_nbytes, kMaxCpuWorkspace) : max_nbytes, num_ranks);
  const CollectiveBytes bytes{.share = share_bytes_, .words = kMaxWordsBytes, .tensors = symmetric_nbytes};
  allocate({agreed("max_nbytes", max_nbytes), agreed("symmetric_nbytes", symmetric_nbytes)},
           [&](std::byte* symmetric, std::byte* local) {
             return place_region(context_, num_ranks, bytes, symmetric, local);
           });
  link(comm_->poison_link());
}

std::byte* Collectives::take_tensor(int64_t nbytes) {
  const CallGate::Turn turn = gate_.enter();
  require_open();
  const int64_t left = symmetric_nbytes_ - taken_;
  if (nbytes > left) {
    throw std::invalid_argument("rank " + std::to_string(member_.rank) + ": " + std::to_string(left) +
                                " bytes are left of symmetric_nbytes=" + std::to_string(symmetric_nbytes_) +
                                ", the tensor takes " + std::to_string(nbytes) +
                                "; pass a larger symmetric_nbytes to Collectives() on every rank");
  }
  std::byte* tensor = context_.region.tensors.at(taken_);
  taken_ = std::min(symmetric_nbytes_, (taken_ + nbytes + kTensorAlignment - 1) / kTensorAlignment * kTensorAlignment);
  return tensor;
}

bool Collectives::holds(const std::byte* data, int64_t nbytes) const {
  const std::byte* begin = context_.region.tensors.data;
  return nbytes > 0 && data >= begin && data + nbytes <= begin + symmetric_nbytes_;
}

// Kernels find a tensor on another rank by its place on this one.
uint64_t Collectives::place_of(const std::byte* data) const {
  return static_cast<uint64_t>(data - context_.region.tensors.data);
}

void Collectives::all_reduce(const Operands& operands, int64_t count, const Method& method, void* stream) {
  const bool is_direct = method.algorithm == Algorithm::kDirect && count > 0;
  const uint64_t places = is_direct ? digest_of(place_of(operands.x), place_of(operands.out)) : 0;
  const Announcement announcement = Announcement::of(
      {CollectiveKind::kAllReduce, operands.dtype, method.op, method.algorithm, method.codec, method.wire}, count,
      places);
  const OneShotArgs vectors{
      .announcement = announcement, .x = operands.x, .out = operands.out, .dtype = operands.dtype, .op = method.op};
  const ShareArgs shares{.announcement = announcement,
                         .x = operands.x,
                         .out = operands.out,
                         .shares = Shares::even(count, member_.num_ranks),
                         .dtype = operands.dtype,
                         .op = method.op};
  const int element_size = size_of(operands.dtype);
  switch (method.algorithm) {
    case Algorithm::kOneShot:
      if (method.wire == CollectiveWire::kRows)
        return launch_vectors(vectors, count, share_bytes_, element_size, method.num_blocks, stream);
      if (count * element_size > kMaxWordsBytes) throw std::invalid_argument("too many bytes for LL words");
      return launch_vectors(OneShotWordsArgs{vectors}, count, kMaxWordsBytes, element_size, method.num_blocks, stream);
    case Algorithm::kRecursiveDoubling:
      return launch_vectors(RecursiveDoublingArgs{vectors}, count, share_bytes_, sizeof(float), method.num_blocks,
                            stream);
    case Algorithm::kRing:
      return launch_shares(RingArgs{shares}, sizeof(float), method.num_blocks, stream);
    case Algorithm::kDirect:
      return launch_direct(DirectAllReduceArgs{shares}, method.num_blocks, stream);
    case Algorithm::kTwoShot:
    case Algorithm::kNone:
      break;
  }
  if (method.codec == LineCodec::kNone)
    return launch_shares(TwoShotArgs{shares}, element_size, method.num_blocks, stream);
  with_line_codec(method.codec, [&](auto codec) {
    launch_shares(CodedTwoShotArgs<decltype(codec)::value>{shares}, kCodedSize, method.num_blocks, stream);
  });
}

// For a call whose tensor `whole` has the shares of all ranks.
ShareArgs Collectives::share_args(CollectiveKind kind, const Operands& operands, const std::byte* whole,
                                  const Shares& shares, ReduceOp op) const {
  const int64_t count = shares.offset[member_.num_ranks];
  const bool is_direct = holds(whole, count * size_of(operands.dtype));
  const Announcement::Terms terms{kind, operands.dtype, op, is_direct ? Algorithm::kDirect : Algorithm::kNone};
  const uint64_t division = digest_of(shares.digest(member_.num_ranks), operands.row_shape);
  const uint64_t digest = digest_of(division, is_direct ? place_of(whole) : 0);
  return {.announcement = Announcement::of(terms, count, digest),
          .x = operands.x,
          .out = operands.out,
          .shares = shares,
          .dtype = operands.dtype,
          .op = op};
}

void Collectives::reduce_scatter(const Operands& operands, const std::vector<int64_t>& counts, ReduceOp op,
                                 int num_blocks, void* stream) {
  const Shares shares = Shares::of(counts);
  ShareArgs args = share_args(CollectiveKind::kReduceScatter, operands, operands.x, shares, op);
  args.out_begin = shares.offset[member_.rank];
  if (args.announcement.is_direct()) return launch_direct(DirectReduceScatterArgs{args}, num_blocks, stream);
  launch_shares(ReduceScatterArgs{args}, size_of(operands.dtype), num_blocks, stream);
}

void Collectives::all_gather(const Operands& operands, const std::vector<int64_t>& counts, int num_blocks,
                             void* stream) {
  const Shares shares = Shares::of(counts);
  ShareArgs args = share_args(CollectiveKind::kAllGather, operands, operands.out, shares, ReduceOp::kSum);
  args.x_begin = shares.offset[member_.rank];
  if (args.announcement.is_direct()) return launch_direct(DirectAllGatherArgs{args}, num_blocks, stream);
  launch_shares(AllGatherArgs{args}, size_of(operands.dtype), num_blocks, stream);
}

// A call without elements, whose launch ends once it has observed that all ranks make it.
void Collectives::barrier(void* stream) {
  const OneShotArgs call{.announcement = Announcement::of({CollectiveKind::kBarrier, DType::kFloat32}, 0)};
  launch_vectors(call, 0, share_bytes_, sizeof(float), 1, stream);
}

// One launch per slice; cut(args, slice) makes the slice's arguments. On a GPU all are launched before an error is
// raised: ranks see the error at different slices, but must launch equally many.
template <class Args, class Cut>
void Collectives::launch_slices(Args args, const std::vector<Slice>& slices, int num_blocks, void* stream,
                                const Cut& cut) {
  const CallGate::Turn turn = gate_.enter();
  require_open();
  raise_timeouts();
  args.context = context_;
  for (const Slice& slice : slices) {
    cut(args, slice);
    launch_or_refuse(args, blocks_for(slice.most_chunks, num_blocks), stream);
    if (device_->is_synchronous()) raise_waits();
    ++args.slice;
  }
  raise_waits();
}

// A launch that fails on the host, where the system has no thread for a block, say, would leave the peers waiting.
template <class Args>
void Collectives::launch_or_refuse(const Args& args, int num_blocks, void* stream) {
  try {
    launch(args, num_blocks, stream);
  } catch (const std::exception& error) {
    try {
      refuse(error.what(), stream);
    } catch (const std::exception&) {  // the first error is the one to raise
    }
    throw;
  }
}

template <class Args>
void Collectives::launch_vectors(const Args& vectors, int64_t count, int64_t slice_bytes, int wire_size, int num_blocks,
                                 void* stream) {
  const int64_t element_size = size_of(vectors.dtype);
  launch_slices(vectors, slices_of(count, slice_bytes, wire_size), num_blocks, stream,
                [&](Args& args, const Slice& slice) {
                  args.x = vectors.x + slice.first * element_size;
                  args.out = vectors.out + slice.first * element_size;
                  args.count = std::min(slice.most, count - slice.first);
                  args.chunk = slice.chunk;
                  args.num_chunks = slice.most_chunks;
                });
}

template <class Args>
void Collectives::launch_shares(const Args& shares, int wire_size, int num_blocks, void* stream) {
  const int64_t largest = shares.shares.largest(member_.num_ranks);
  launch_slices(shares, slices_of(largest, share_bytes_, wire_size, Args::kLargeChunk), num_blocks, stream,
                [](Args& args, const Slice& slice) { args.extent = slice; });
}

template <class Args>
void Collectives::launch_direct(const Args& shares, int num_blocks, void* stream) {
  const int64_t largest = shares.shares.largest(member_.num_ranks);
  launch_slices(shares, {whole_of(largest, size_of(shares.dtype))}, num_blocks, stream,
                [](Args& args, const Slice& slice) { args.extent = slice; });
}

// On a GPU, one block per chunk and one that announces the call (meeting.h). `num_blocks`: the limit for this call.
int Collectives::blocks_for(int64_t num_chunks, int num_blocks) const {
  const bool is_cpu = device_->is_synchronous();
  int most = share_of_device();
  if (num_blocks_ > 0) most = std::min(most, num_blocks_);
  if (num_blocks > 0) {
    most = std::min(most, num_blocks);
  } else if (is_cpu && num_blocks_ == 0) {
    most = std::min(most, device_->default_blocks());
  }
  return static_cast<int>(std::clamp<int64_t>(num_chunks + !is_cpu, 1, std::max(1, most)));
}

void Collectives::refuse(const std::string& why, void* stream) {
  const CallGate::Turn turn = gate_.enter();
  if (nobody_waits()) return;
  launch(
      RefuseCollectiveArgs{
          .context = context_, .announcement = Announcement::of_refusal(), .text = to_refusal_text(why)},
      1, stream);
}

void Collectives::raise_in_own_words(const Report& report) {
  if (report.awaited == collective_kind::kDisagreement) raise_mismatch(report);
}

}  // namespace moe_a2a
