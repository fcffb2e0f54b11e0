// Kernels that wait for no other rank.
#include "comm/define_family.h"
#include "moe/gather_rows.h"
#include "moe/recv_topk.h"
#include "moe/route/topk_layout.h"
#include "moe/term_weights.h"
#include "moe/vocabulary.h"
#include "moe/weighted_grads.h"

MOE_A2A_KERNEL_FAMILY(local_kernels, kMoeVocabulary, GatherRows, RecvTopk, TermWeights, TopkLayout, WeightedGrads)
