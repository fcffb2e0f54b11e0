#include "collectives/one_shot.h"
#include "comm/define_family.h"

MOE_A2A_KERNEL_FAMILY(collective_kernels, kCollectiveVocabulary, OneShot)
