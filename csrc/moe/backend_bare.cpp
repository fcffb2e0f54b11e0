// The kernels without the recorder of the trace: what is launched as long as the trace is off.
#define MOE_A2A_RECORDING 0
#include "moe/backend.cpp"
