// The one door to the machine. A file is compiled for one target: the CPU, CUDA or HIP; a test may bring its own.
//
// Every target offers the same words, each in its own inline namespace so that two targets link into one program:
//   groups     Thread, Warp, Block, Grid: rank(), size(), sync(), broadcast(), any(), sum(), inclusive_sum()
//   memory     atomic_load / atomic_store / atomic_add with order and scope, Vec16, load16 / store16, copy_bytes,
//              warp_memory<T>(): a T of each warp's own
//   numbers    to_float(), from_float<T>()
//   time       clock_now() in ticks of ClockRate, pause()
//   host       launch<Kernel>(), Device: memory, sharing of memory, streams
#pragma once

#if defined(MOE_A2A_TARGET_HEADER)
#include MOE_A2A_TARGET_HEADER
#elif defined(__HIP__)
#include "target/hip.h"
#elif defined(__CUDACC__)
#include "target/cuda.h"
#else
#include "target/cpu.h"
#endif
