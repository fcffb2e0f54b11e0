#pragma once

#include "comm/kernel_family.h"

MOE_A2A_DECLARE_FAMILY(comm_kernels)
