// A device as the host sees it: memory that ranks share, and launches. Host code is compiled once, and several targets
// live in one library; each has a Machine, which is a Device.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "arch/launch_site.h"
#include "arch/memory_handle.h"

namespace moe_a2a {

// Identifies a kernel by its argument type.
using ArgsId = const void*;
template <class Args>
inline constexpr char kArgsMark = 0;
template <class Args>
constexpr ArgsId id_of_args() {
  return &kArgsMark<Args>;
}

// A type-erased kernel of one target.
struct KernelEntry {
  ArgsId args;
  void (*prepare)(const LaunchSite& site);
  void (*launch)(const LaunchSite& site, const void* args);
};

// A family's kernels for one target: launched with the trace on, and off.
struct KernelFamily {
  std::span<const KernelEntry> traced, untraced;
};

class Device {
 public:
  Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  virtual ~Device() = default;

  virtual int default_blocks() const = 0;
  virtual int max_blocks() const = 0;                               // one per compute unit
  virtual int num_resident_blocks() const { return max_blocks(); }  // at once: for blocks that wait for each other
  // The device deals the blocks of a launch to its n dies in turn, and each die holds its part of the resident blocks.
  // Returns n or a multiple of it.
  virtual int num_dies() const { return 1; }
  virtual int warps_per_block() const = 0;
  virtual bool is_synchronous() const = 0;  // a launch returns when its work is done
  virtual bool needs_aligned_vectors() const = 0;
  virtual double clock_ticks_per_second() const = 0;

  // All memory is zeroed.
  virtual std::byte* allocate_symmetric(size_t nbytes, int num_ranks, MemoryHandle* handle) = 0;
  // Throws unless the memory is what the handle says. `timeout_seconds`: how long to wait for an owner in another pid
  // namespace.
  virtual std::byte* open_peer(const MemoryHandle& handle, double timeout_seconds) = 0;
  virtual void close_peer(std::byte* memory) = 0;  // undoes open_peer() when another peer cannot be opened
  virtual void confirm_peer(std::byte* memory, int own_rank) = 0;  // once all peers are open
  virtual std::byte* allocate_local(size_t nbytes) = 0;
  virtual std::byte* allocate_host_visible(size_t nbytes) = 0;  // read by the host while kernels run
  virtual void clear(void* memory, size_t nbytes) = 0;          // while no kernel uses the memory
  virtual void clear_in_order(void* memory, size_t nbytes, void* stream) = 0;
  virtual void copy_to_host(void* target, const void* source, size_t nbytes) = 0;
  virtual void copy_to_device(void* target, const void* source, size_t nbytes) = 0;
  virtual void synchronize() = 0;
  // Work queued on `later` from now on runs after everything already queued on `earlier`; no effect if only one of them
  // is capturing.
  virtual void order_streams(void* earlier, void* later) = 0;
  virtual bool is_capturing(void* stream) const = 0;  // into a graph, which may be replayed
  virtual void* own_stream() = 0;                     // for launches that no user call makes
  // Ends the waits of the running launch and of all later ones, where the host can. Callable from any thread.
  virtual void interrupt() = 0;
  virtual bool is_interrupted() const = 0;  // by interrupt() or by the host hook; see arch/interrupt.h
  virtual void close() = 0;

  int64_t max_shared_bytes() const { return site_.max_shared_bytes; }  // per block

  // Loads a family's kernels; required once, before the first of them is launched.
  void add(const KernelFamily& family);

  // Launches the kernel with these arguments; `is_traced`: its recording variant.
  template <class Args>
  void launch(const Args& args, bool is_traced, int num_blocks, void* stream) {
    const Kernel& kernel = find(id_of_args<Args>());
    LaunchSite site = site_;
    site.num_blocks = num_blocks;
    site.stream = stream;
    (is_traced ? kernel.traced : kernel.untraced).launch(site, &args);
  }

 protected:
  LaunchSite site_;

 private:
  struct Kernel {
    KernelEntry traced, untraced;
  };
  const Kernel& find(ArgsId args) const;

  std::vector<Kernel> kernels_;
};

// Keeps the launches of one object in order, whatever streams they are queued on: those that run, and those that are
// captured into a graph, which whoever replays it must order with the rest.
class LaunchOrder {
 public:
  // Call it before a launch on `stream`.
  void next(Device& device, void* stream) {
    std::optional<void*>& last = device.is_capturing(stream) ? captured_ : queued_;
    if (last && *last != stream) device.order_streams(*last, stream);
    last = stream;
  }
  // Before `stream` is destroyed, with nothing queued on it.
  void forget(void* stream) {
    if (queued_ == stream) queued_.reset();
    if (captured_ == stream) captured_.reset();
  }

 private:
  std::optional<void*> queued_, captured_;  // where the last launch of each kind went
};

// `target` is "cpu", "cuda" or "hip". Throws when this build lacks it, naming the targets that it has.
std::unique_ptr<Device> make_device(const std::string& target, int index);
std::vector<std::string> built_targets();

}  // namespace moe_a2a

// The targets that this library was built with.
#if defined(MOE_A2A_WITH_CPU)
#define MOE_A2A_IF_CPU(...) __VA_ARGS__
#else
#define MOE_A2A_IF_CPU(...)
#endif
#if defined(MOE_A2A_WITH_CUDA)
#define MOE_A2A_IF_CUDA(...) __VA_ARGS__
#else
#define MOE_A2A_IF_CUDA(...)
#endif
#if defined(MOE_A2A_WITH_HIP)
#define MOE_A2A_IF_HIP(...) __VA_ARGS__
#else
#define MOE_A2A_IF_HIP(...)
#endif
