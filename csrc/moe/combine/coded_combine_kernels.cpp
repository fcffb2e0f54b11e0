#include "comm/define_family.h"
#include "moe/combine/combine.h"
#include "moe/vocabulary.h"

MOE_A2A_KERNEL_FAMILY(coded_combine_kernels, kMoeVocabulary, CodedCombine, CodedCombineSend)
