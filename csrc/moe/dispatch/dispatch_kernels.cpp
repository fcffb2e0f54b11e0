#include "comm/define_family.h"
#include "moe/both_halves.h"
#include "moe/gather_rows.h"
#include "moe/notices.h"
#include "moe/vocabulary.h"

MOE_A2A_KERNEL_FAMILY(dispatch_kernels, kMoeVocabulary, Dispatch, DispatchSend, DispatchRecv, GatherRows,
                      RefuseDispatch)
