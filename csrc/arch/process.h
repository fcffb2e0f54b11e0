// Which process this is. Processes are distinguished by a random identity, not by pid: two containers may each have a
// process 1, and pids are reused.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace moe_a2a {

struct ProcessIdentity {
  uint64_t word[2] = {};
  uint64_t pid = 0;  // in its own namespace; for messages, and to find its files in /proc

  bool operator==(const ProcessIdentity& other) const { return word[0] == other.word[0] && word[1] == other.word[1]; }
};

// Drawn once per process; a forked child draws its own.
const ProcessIdentity& this_process();

// Remembers the process that made an object. Threads, mappings and device contexts do not survive a fork, so a forked
// child must neither use nor clean up what its parent made.
class MakerProcess {
 public:
  MakerProcess() : maker_(this_process()) {}
  bool is_this_process() const { return maker_ == this_process(); }
  // Throws std::runtime_error in any other process. `what` names the object: "ExpertParallel".
  void require(const std::string& what) const;

 private:
  ProcessIdentity maker_;
};

// Owns a T in the process that made it. A forked child leaks its copy: a thread that does not exist there may hold the
// T's mutex.
struct DeleteInMaker {
  MakerProcess maker;

  template <class T>
  void operator()(T* object) const {
    if (maker.is_this_process()) delete object;
  }
};
template <class T>
using OwnedByMaker = std::unique_ptr<T, DeleteInMaker>;

}  // namespace moe_a2a
