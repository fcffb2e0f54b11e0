// The families of MoE kernels.
#pragma once

#include "comm/kernel_family.h"

MOE_A2A_DECLARE_FAMILY(dispatch_kernels)
MOE_A2A_DECLARE_FAMILY(combine_kernels)
MOE_A2A_DECLARE_FAMILY(link_floor_kernels)
