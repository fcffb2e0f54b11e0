// A GPU as a Device, for both vendors: their runtimes differ in the prefix of their names, MOE_A2A_GPU(name).
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "arch/device.h"
#include "arch/device_switch.h"
#include "arch/live_memory.h"
#include "arch/out_of_memory.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

inline void check(MOE_A2A_GPU(Error_t) error, const char* what) {
  if (error == MOE_A2A_GPU(Success)) return;
  (void)MOE_A2A_GPU(GetLastError)();  // a reported error must not stick to the next call
  throw std::runtime_error(std::string(what) + ": " + MOE_A2A_GPU(GetErrorString)(error));
}

// The runtime's own way, for programs without PyTorch.
inline constexpr DeviceSwitch kRuntimeSwitch = {
    .exchange =
        [](int device) {
          int before = 0;
          (void)MOE_A2A_GPU(GetDevice)(&before);
          if (before != device) check(MOE_A2A_GPU(SetDevice)(device), "selecting the device");
          return before;
        },
    .restore = [](int device) { (void)MOE_A2A_GPU(SetDevice)(device); },
};

// Makes a device current and restores the caller's: PyTorch's current device is not ours to change.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device)
      : switch_(device_switch(kRuntimeSwitch)), before_(switch_.exchange(device)), changed_(before_ != device) {}
  ~DeviceGuard() {
    if (changed_) switch_.restore(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  const DeviceSwitch& switch_;
  int before_;
  bool changed_;
};

template <class Vendor>
class SimtMachine final : public Device {
 public:
  explicit SimtMachine(int device) : device_(device) {
    (void)MOE_A2A_GPU(DeviceGetAttribute)(&max_blocks_, Vendor::kMultiprocessorCount, device_);
    num_resident_blocks_ = Vendor::num_resident_blocks(device_, max_blocks_);
    num_dies_ = Vendor::num_dies(device_, max_blocks_);
    site_.device = device_;
    site_.max_shared_bytes = shared_bytes_of_block();
  }

  int default_blocks() const override { return 32; }
  int max_blocks() const override { return max_blocks_; }
  int num_resident_blocks() const override { return num_resident_blocks_; }
  int num_dies() const override { return num_dies_; }
  int warps_per_block() const override { return kBlockThreads / kWarpSize; }
  bool is_synchronous() const override { return false; }
  bool needs_aligned_vectors() const override { return kAlignedVectors; }
  double clock_ticks_per_second() const override { return Vendor::clock_ticks_per_second(device_); }

  std::byte* allocate_symmetric(size_t nbytes, int /*num_ranks*/, MemoryHandle* handle) override {
    const DeviceGuard guard(device_);
    // Small allocations share a page, and a process cannot map the same page of another one twice.
    nbytes = (nbytes + kPage - 1) / kPage * kPage;
    void* memory = nullptr;
    require_memory(Vendor::malloc_symmetric(&memory, nbytes), "the symmetric heap", nbytes);
    allocations_.push_back(memory);
    zero(memory, nbytes);
    *handle = {.nbytes = nbytes,
               .address = reinterpret_cast<uint64_t>(memory),
               .machine_id = this_machine_id(),
               .process = this_process(),
               .device = device_};
    MOE_A2A_GPU(IpcMemHandle_t) ipc;
    check(MOE_A2A_GPU(IpcGetMemHandle)(&ipc, memory), "sharing the symmetric heap with other processes");
    static_assert(sizeof(ipc) <= sizeof(handle->opaque));
    std::memcpy(handle->opaque, &ipc, sizeof(ipc));
    LiveMemory::of_this_process().add(handle->address, nbytes);
    return static_cast<std::byte*>(memory);
  }

  std::byte* open_peer(const MemoryHandle& handle, double /*timeout_seconds*/) override {
    const DeviceGuard guard(device_);
    require_this_machine(handle);
    if (handle.process == this_process()) {
      require_live(handle, LiveMemory::of_this_process().nbytes_at(handle.address));
      if (handle.device != device_) enable_access_to(static_cast<int>(handle.device));
      return reinterpret_cast<std::byte*>(handle.address);
    }
    MOE_A2A_GPU(IpcMemHandle_t) ipc;
    std::memcpy(&ipc, handle.opaque, sizeof(ipc));
    void* memory = nullptr;
    check(MOE_A2A_GPU(IpcOpenMemHandle)(&memory, ipc, MOE_A2A_GPU(IpcMemLazyEnablePeerAccess)),
          "mapping the symmetric heap of another rank (peer access between the devices is required)");
    opened_.push_back(memory);
    const size_t nbytes = Vendor::size_of_mapping(memory);  // 0: the runtime cannot say
    if (nbytes != 0 && nbytes < handle.nbytes) {
      close_peer(static_cast<std::byte*>(memory));
      throw std::invalid_argument("its heap has " + std::to_string(nbytes) + " bytes, expected " +
                                  std::to_string(handle.nbytes) +
                                  "; pass the handle of the object that this group makes");
    }
    return static_cast<std::byte*>(memory);
  }
  void close_peer(std::byte* memory) override {
    if (std::erase(opened_, static_cast<void*>(memory)) == 0) return;  // a thread of this process: nothing was opened
    const DeviceGuard guard(device_);
    (void)MOE_A2A_GPU(IpcCloseMemHandle)(memory);
  }
  void confirm_peer(std::byte*, int /*own_rank*/) override {}

  // Only once no peer writes here any more. Memory that is not closed stays until the process ends.
  void close() override {
    const DeviceGuard guard(device_);
    (void)MOE_A2A_GPU(DeviceSynchronize)();
    for (void* memory : opened_) (void)MOE_A2A_GPU(IpcCloseMemHandle)(memory);
    for (void* memory : allocations_) {
      LiveMemory::of_this_process().remove(reinterpret_cast<uint64_t>(memory));
      (void)MOE_A2A_GPU(Free)(memory);
    }
    for (void* memory : host_) (void)Vendor::free_host(memory);
    if (order_event_ != nullptr) (void)MOE_A2A_GPU(EventDestroy)(order_event_);
    if (own_stream_ != nullptr) (void)MOE_A2A_GPU(StreamDestroy)(own_stream_);
    order_event_ = nullptr;
    own_stream_ = nullptr;
    opened_.clear();
    allocations_.clear();
    host_.clear();
  }

  std::byte* allocate_local(size_t nbytes) override {
    const DeviceGuard guard(device_);
    void* memory = nullptr;
    require_memory(MOE_A2A_GPU(Malloc)(&memory, nbytes), "local memory", nbytes);
    allocations_.push_back(memory);
    zero(memory, nbytes);
    return static_cast<std::byte*>(memory);
  }

  std::byte* allocate_host_visible(size_t nbytes) override {
    const DeviceGuard guard(device_);
    void* memory = nullptr;
    check(Vendor::malloc_host(&memory, nbytes), "allocating the report");
    host_.push_back(memory);
    std::memset(memory, 0, nbytes);
    return static_cast<std::byte*>(memory);
  }

  void clear(void* memory, size_t nbytes) override {
    const DeviceGuard guard(device_);
    zero(memory, nbytes);
  }

  void clear_in_order(void* memory, size_t nbytes, void* stream) override {
    const DeviceGuard guard(device_);
    check(MOE_A2A_GPU(MemsetAsync)(memory, 0, nbytes, static_cast<MOE_A2A_GPU(Stream_t)>(stream)), "clearing memory");
  }

  void copy_to_host(void* target, const void* source, size_t nbytes) override {
    const DeviceGuard guard(device_);
    check(MOE_A2A_GPU(Memcpy)(target, source, nbytes, MOE_A2A_GPU(MemcpyDeviceToHost)), "reading device memory");
  }

  void copy_to_device(void* target, const void* source, size_t nbytes) override {
    const DeviceGuard guard(device_);
    check(MOE_A2A_GPU(Memcpy)(target, source, nbytes, MOE_A2A_GPU(MemcpyHostToDevice)), "writing device memory");
  }

  void synchronize() override {
    const DeviceGuard guard(device_);
    check(MOE_A2A_GPU(DeviceSynchronize)(), "waiting for the device");
  }
  // Waits in kernels end only by their deadline.
  void interrupt() override {}
  bool is_interrupted() const override { return false; }

  // A captured graph cannot be ordered with work outside it: whoever replays the graph must do that.
  void order_streams(void* earlier, void* later) override {
    const DeviceGuard guard(device_);
    const auto from = static_cast<MOE_A2A_GPU(Stream_t)>(earlier), to = static_cast<MOE_A2A_GPU(Stream_t)>(later);
    if (is_capturing(from) != is_capturing(to)) return;
    if (order_event_ == nullptr) {
      check(MOE_A2A_GPU(EventCreateWithFlags)(&order_event_, MOE_A2A_GPU(EventDisableTiming)), "making an event");
    }
    check(MOE_A2A_GPU(EventRecord)(order_event_, from), "ordering a call after the previous one on another stream");
    check(MOE_A2A_GPU(StreamWaitEvent)(to, order_event_, 0),
          "ordering a call after the previous one on another stream");
  }
  bool is_capturing(void* stream) const override {
    MOE_A2A_GPU(StreamCaptureStatus) status = MOE_A2A_GPU(StreamCaptureStatusNone);
    // An error means that this is the null stream and another stream of the thread is capturing; this one is not.
    const auto asked = MOE_A2A_GPU(StreamIsCapturing)(static_cast<MOE_A2A_GPU(Stream_t)>(stream), &status);
    if (asked != MOE_A2A_GPU(Success)) (void)MOE_A2A_GPU(GetLastError)();
    return status == MOE_A2A_GPU(StreamCaptureStatusActive);
  }
  // For the library's own launches; never the null stream, which waits for all others.
  void* own_stream() override {
    const DeviceGuard guard(device_);
    if (own_stream_ == nullptr) {
      check(MOE_A2A_GPU(StreamCreateWithFlags)(&own_stream_, MOE_A2A_GPU(StreamNonBlocking)), "making a stream");
    }
    return own_stream_;
  }

 private:
  static constexpr size_t kPage = size_t{2} << 20;

  void require_memory(MOE_A2A_GPU(Error_t) error, const char* what, size_t nbytes) const {
    if (error == MOE_A2A_GPU(Success)) return;
    (void)MOE_A2A_GPU(GetLastError)();
    throw OutOfMemory(std::string(what) + " needs " + std::to_string(nbytes) + " bytes on device " +
                      std::to_string(device_) + ": " + MOE_A2A_GPU(GetErrorString)(error));
  }
  // Leaves room for a kernel's static shared memory.
  int64_t shared_bytes_of_block() const {
    constexpr int kOfTheKernel = 6 * 1024;
    int count = 0;
    check(MOE_A2A_GPU(DeviceGetAttribute)(&count, Vendor::kMaxSharedMemory, device_),
          "querying the shared memory of a block");
    return count - kOfTheKernel;
  }
  void zero(void* memory, size_t nbytes) {
    check(MOE_A2A_GPU(Memset)(memory, 0, nbytes), "clearing memory");
    check(MOE_A2A_GPU(DeviceSynchronize)(), "clearing memory");
  }
  void enable_access_to(int peer_device) {
    const auto error = MOE_A2A_GPU(DeviceEnablePeerAccess)(peer_device, 0);
    if (error == MOE_A2A_GPU(ErrorPeerAccessAlreadyEnabled)) {
      (void)MOE_A2A_GPU(GetLastError)();
    } else {
      check(error, "enabling peer access between the devices of two ranks");
    }
  }

  MOE_A2A_GPU(Event_t) order_event_ = nullptr;
  MOE_A2A_GPU(Stream_t) own_stream_ = nullptr;
  int device_, max_blocks_ = 1, num_resident_blocks_ = 1, num_dies_ = 1;
  std::vector<void*> allocations_, opened_, host_;
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
