// The kernels of the collectives.
#pragma once

#include "comm/kernel_family.h"

MOE_A2A_DECLARE_FAMILY(collective_kernels)
MOE_A2A_DECLARE_FAMILY(coded_collective_kernels)
