#include "comm/define_family.h"
#include "moe/link_floor.h"
#include "moe/vocabulary.h"

MOE_A2A_KERNEL_FAMILY(link_floor_kernels, kMoeVocabulary, PushRows)
