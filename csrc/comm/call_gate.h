// Admits one call of an object at a time, from any thread of the process that made it.
#pragma once

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

  // One call's turn, held for the object's lifetime.
  class Turn {
   public:
    explicit Turn(CallGate& gate) : gate_(gate) {}
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    ~Turn() { gate_.leave(); }

   private:
    CallGate& gate_;
  };

  // Blocks until no other thread is in a call; reentrant, so that a call may make other calls. Throws in a
  // process that did not make the object, and in a signal handler that interrupted a call of this object. Throws
  // Interrupted when a signal ends the wait. The caller must not hold a lock that the host hook takes (Python's GIL).
  [[nodiscard]] Turn enter();

  bool is_own_process() const { return maker_.is_this_process(); }
  void require_own_process() const { maker_.require(what_); }
  // Whether this thread is in a call.
  bool is_inside() const;

 private:
  struct State;
  void leave();

  std::string what_;
  MakerProcess maker_;
  OwnedByMaker<State> state_;
};

}  // namespace moe_a2a
