#include "collectives/direct.h"
#include "collectives/one_shot_words.h"
#include "collectives/recursive_doubling.h"
#include "collectives/refuse_collective.h"
#include "collectives/ring.h"
#include "collectives/two_shot.h"
#include "comm/define_family.h"

MOE_A2A_KERNEL_FAMILY(collective_kernels, kCollectiveVocabulary, OneShot, OneShotWords, TwoShot, ReduceScatter,
                      AllGather, DirectAllReduce, DirectReduceScatter, DirectAllGather, RefuseCollective, Ring,
                      RecursiveDoubling)
