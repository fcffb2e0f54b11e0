#include "comm/align_clocks.h"
#include "comm/define_family.h"
#include "comm/goodbye.h"

MOE_A2A_KERNEL_FAMILY(comm_kernels, kCommVocabulary, AlignClocks, Goodbye)
