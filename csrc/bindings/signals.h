// Python's signals during waits: Ctrl-C ends a call that waits for other ranks.
#pragma once

namespace moe_a2a::bindings {

// Makes waits on the host check for signals; see arch/interrupt.h.
void watch_signals();

// Restores the Python error that a signal handler raised during this thread's wait; false: there is none.
bool restore_signal_error();

// Throws it, without the GIL: after launches that wait for no rank and so end as if there were no signal.
void raise_signal_error();

}  // namespace moe_a2a::bindings
