#include "comm/define_family.h"
#include "moe/experts/simulated_combine.h"
#include "moe/experts/simulated_experts.h"
#include "moe/vocabulary.h"

MOE_A2A_KERNEL_FAMILY(simulated_experts_kernels, kMoeVocabulary, SimulatedExperts, SimulatedCombine,
                      SimulatedCombineSend)
