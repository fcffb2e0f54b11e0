#include "comm/define_family.h"
#include "moe/combine/combine.h"
#include "moe/notices.h"
#include "moe/vocabulary.h"

MOE_A2A_KERNEL_FAMILY(combine_kernels, kMoeVocabulary, Combine, CombineSend, CombineRecv, RefuseCombine, Release)
