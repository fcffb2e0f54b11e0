// Lets one call of an object in at a time, from threads of the process that made it.
#pragma once

#include <memory>
#include <string>

#include "arch/process.h"

namespace moe_a2a {

class CallGate {
 public:
  // `what` names the object in errors: "ExpertParallel".
  explicit CallGate(std::string what);
  CallGate(const CallGate&) = delete;
  CallGate& operator=(const CallGate&) = delete;
  ~CallGate();

  // A call's turn: it lasts as long as the object.
  class Turn {
   public:
    explicit Turn(CallGate& gate) : gate_(gate) {}
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    ~Turn() { gate_.leave(); }

   private:
    CallGate& gate_;
  };

  // Waits until no other thread is in a call. A call may enter again, for a part of itself. Raises in another process
  // than the maker's, and in a signal handler that runs in the middle of a call of this object; Interrupted when a
  // signal ends the wait. The caller must not hold a lock that the host hook takes (Python's GIL).
  [[nodiscard]] Turn enter();

  bool is_own_process() const { return maker_.is_true(); }
  void require_own_process() const { maker_.require(what_); }
  // Whether this thread is in a call.
  bool is_inside() const;

 private:
  struct State;
  void leave();

  std::string what_;
  MadeByThisProcess maker_;
  std::unique_ptr<State> state_;  // left alone in a forked child: a thread that is not there may hold it
};

}  // namespace moe_a2a
