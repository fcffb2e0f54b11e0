#include "comm/define_family.h"
#include "moe/dispatch/dispatch.h"
#include "moe/notices.h"
#include "moe/vocabulary.h"

MOE_A2A_KERNEL_FAMILY(dispatch_kernels, kMoeVocabulary, Dispatch, DispatchSend, DispatchRecv, RefuseDispatch,
                      RefuseAnyBuffer)

namespace moe_a2a {

int64_t MOE_A2A_JOIN(max_quantized_row_bytes_, MOE_A2A_TARGET)(int64_t max_shared_bytes) {
  return RowWire::max_quantized_row_bytes(max_shared_bytes);
}

}  // namespace moe_a2a
