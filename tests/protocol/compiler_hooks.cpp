// Plain loads and stores of the explored code, as the compiler reports them. model_rank.cpp, which holds the kernels,
// is compiled with -fsanitize=thread, but not linked with that sanitizer's runtime: these functions replace it. So
// every plain access of the real kernels is checked for races, without a line in csrc/.
#include "observed.h"

using moe_a2a::observed_read;
using moe_a2a::observed_write;

#define MOE_A2A_HOOK(bytes)                                                           \
  void __tsan_read##bytes(void* address) { observed_read(address, bytes); }           \
  void __tsan_write##bytes(void* address) { observed_write(address, bytes); }         \
  void __tsan_unaligned_read##bytes(void* address) { observed_read(address, bytes); } \
  void __tsan_unaligned_write##bytes(void* address) { observed_write(address, bytes); }

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit(void*) {}
void __tsan_vptr_read(void*) {}
void __tsan_vptr_update(void*, void*) {}

MOE_A2A_HOOK(1)
MOE_A2A_HOOK(2)
MOE_A2A_HOOK(4)
MOE_A2A_HOOK(8)
MOE_A2A_HOOK(16)
void __tsan_read_range(void* address, size_t bytes) { observed_read(address, bytes); }
void __tsan_write_range(void* address, size_t bytes) { observed_write(address, bytes); }

}  // extern "C"
