#include "collectives/two_shot.h"
#include "comm/define_family.h"

MOE_A2A_KERNEL_FAMILY(coded_collective_kernels, kCollectiveVocabulary, CodedTwoShot<LineCodec::kFp8>,
                      CodedTwoShot<LineCodec::kQ8>, CodedTwoShot<LineCodec::kQ6>, CodedTwoShot<LineCodec::kQ4>)
