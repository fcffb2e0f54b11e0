// One target seen from the host: memory and launches behind one interface, so that the rest of the runtime is compiled
// once and several targets live in one library.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "arch/memory_handle.h"
#include "moe/args.h"

namespace moe_a2a {

struct PushRowsArgs;

class Backend {
 public:
  virtual ~Backend() = default;

  virtual const char* name() const = 0;
  virtual int default_blocks() const = 0;
  virtual int max_blocks() const = 0;
  virtual int warps_per_block() const = 0;
  virtual bool is_synchronous() const = 0;  // a launch returns when its work is done
  virtual bool needs_aligned_vectors() const = 0;
  virtual int64_t max_shared_bytes() const = 0;         // that a block may use
  virtual int64_t max_quantized_row_bytes() const = 0;  // a block puts two of them together in its shared memory
  virtual double clock_ticks_per_second() const = 0;

  virtual std::byte* allocate_symmetric(size_t nbytes, int num_ranks, MemoryHandle* handle) = 0;
  virtual std::byte* open_peer(const MemoryHandle& handle, int num_ranks) = 0;
  virtual std::byte* allocate_local(size_t nbytes) = 0;
  virtual std::byte* allocate_host_visible(size_t nbytes) = 0;
  virtual void clear(void* memory, size_t nbytes) = 0;  // when no kernel is at work there
  virtual void copy_to_host(void* target, const void* source, size_t nbytes) = 0;
  virtual void synchronize() = 0;
  virtual void close() = 0;

  virtual void launch(const DispatchArgs& args, int num_blocks, void* stream) = 0;
  virtual void launch(const CombineArgs& args, int num_blocks, void* stream) = 0;
  virtual void launch(const DispatchSendArgs& args, int num_blocks, void* stream) = 0;
  virtual void launch(const DispatchRecvArgs& args, int num_blocks, void* stream) = 0;
  virtual void launch(const GatherRowsArgs& args, int num_blocks, void* stream) = 0;
  virtual void launch(const CombineSendArgs& args, int num_blocks, void* stream) = 0;
  virtual void launch(const CombineRecvArgs& args, int num_blocks, void* stream) = 0;
  virtual void launch(const RefuseDispatchArgs& args, int num_blocks, void* stream) = 0;
  virtual void launch(const RefuseCombineArgs& args, int num_blocks, void* stream) = 0;
  virtual void launch(const GoodbyeArgs& args, int num_blocks, void* stream) = 0;
  virtual void launch(const ReleaseArgs& args, int num_blocks, void* stream) = 0;
  virtual void launch(const PushRowsArgs& args, int num_blocks, void* stream) = 0;
  virtual void launch(const AlignClocksArgs& args, int num_blocks, void* stream) = 0;
};

// `target` is "cpu", "cuda" or "hip"; raises when this build has no such target, naming those that it has.
std::unique_ptr<Backend> make_backend(const std::string& target, int device);
std::vector<std::string> built_targets();

}  // namespace moe_a2a
