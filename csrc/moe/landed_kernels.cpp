// Kernels that read what a dispatch has left here, and wait for nobody.
#include "comm/define_family.h"
#include "moe/gather_rows.h"
#include "moe/recv_topk.h"
#include "moe/vocabulary.h"
#include "moe/weighted_grads.h"

MOE_A2A_KERNEL_FAMILY(landed_kernels, kMoeVocabulary, GatherRows, RecvTopk, WeightedGrads)
