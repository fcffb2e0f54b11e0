// Collectives over the same communicator, signals and waits as the MoE kernels, and without any MoE object.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "collectives/collective_region.h"
#include "collectives/shares.h"
#include "comm/communicator.h"

namespace moe_a2a {

struct ShareArgs;

// Every rank makes the same calls in the same order, with the same counts, dtype, operator and algorithm. If a rank
// makes a different call, all ranks throw CallMismatch and the call is over on every rank. Values are merged in fp32
// and rounded once, by kOneShot, kTwoShot and reduce_scatter in rank order; all ranks get the same bits.
class Collectives : public Client {
 public:
  struct Operands {
    const std::byte* x = nullptr;
    std::byte* out = nullptr;
    DType dtype = DType::kFloat32;
    uint64_t row_shape = 0;  // a digest: ranks must agree on it, kernels see elements
  };

  // `max_nbytes`: size of the workspace; larger tensors are sent in slices. `symmetric_nbytes`: memory for
  // take_tensor(). `num_blocks`: the limit for a launch; 0: as many as the device runs at once.
  Collectives(std::shared_ptr<Communicator> comm, int64_t max_nbytes, int64_t symmetric_nbytes = 0, int num_blocks = 0);

  // Memory for a tensor of the caller, in use until the object is destroyed. If every rank takes tensors of the same
  // sizes in the same order, each lies at the same place on all ranks.
  std::byte* take_tensor(int64_t nbytes);
  // Whether these bytes lie in such memory. False if there are none.
  bool holds(const std::byte* data, int64_t nbytes) const;

  struct Method {
    ReduceOp op = ReduceOp::kSum;
    Algorithm algorithm = Algorithm::kTwoShot;
    LineCodec codec = LineCodec::kNone;           // only for kTwoShot
    CollectiveWire wire = CollectiveWire::kRows;  // kWords: only for kOneShot, up to kMaxWordsBytes
    int num_blocks = 0;                           // the limit for this call; 0: from the constructor
  };

  // out[i] = x[i] of all ranks, merged. `out` may be `x`. kDirect: both must be held, see holds().
  void all_reduce(const Operands& operands, int64_t count, const Method& method, void* stream);
  // counts: elements of each rank's share. x: the shares of all ranks, one after the other; out: this rank's share,
  // merged. `out` may be that part of `x`. If `x` is held on every rank, no workspace is used.
  void reduce_scatter(const Operands& operands, const std::vector<int64_t>& counts, ReduceOp op, int num_blocks,
                      void* stream);
  // x: this rank's share; out: those of all ranks, one after the other. `x` may be that part of `out`. If `out`
  // is held on every rank, no workspace is used.
  void all_gather(const Operands& operands, const std::vector<int64_t>& counts, int num_blocks, void* stream);
  // Ends once every rank has begun it.
  void barrier(void* stream);

  // Replaces a call that failed before its launch. The peers throw PeerRefused with this text, and the call counts as
  // made on every rank.
  void refuse(const std::string& why, void* stream);

  // The bytes of a vector that one launch of kOneShot handles.
  int64_t share_bytes() const { return share_bytes_; }

 private:
  // In slices of `slice_bytes`. `wire_size`: bytes of an element on the wire.
  template <class Args>
  void launch_vectors(const Args& vectors, int64_t count, int64_t slice_bytes, int wire_size, int num_blocks,
                      void* stream);
  template <class Args>
  void launch_shares(const Args& shares, int wire_size, int num_blocks, void* stream);
  template <class Args, class Cut>
  void launch_slices(Args args, const std::vector<Slice>& slices, int num_blocks, void* stream, const Cut& cut);
  template <class Args>
  void launch_or_refuse(const Args& args, int num_blocks, void* stream);
  template <class Args>
  void launch_direct(const Args& shares, int num_blocks, void* stream);
  uint64_t place_of(const std::byte* data) const;
  ShareArgs share_args(CollectiveKind kind, const Operands& operands, const std::byte* whole, const Shares& shares,
                       ReduceOp op) const;
  int blocks_for(int64_t num_chunks, int num_blocks) const;
  void raise_in_own_words(const Report& report) override;

  std::shared_ptr<Communicator> comm_;
  CollectiveContext context_;
  int64_t share_bytes_;
  int64_t symmetric_nbytes_, taken_ = 0;
  int num_blocks_;
};

}  // namespace moe_a2a
