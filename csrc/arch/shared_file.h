// A nameless file in /dev/shm that other processes can map: nothing is left behind if every process that knows it is
// killed.
//
// Peers open it as /proc/<pid>/fd/<n> of its owner. If they cannot (different pid namespace, or an owner that is not
// dumpable), the file gets a name until all have mapped it. The owner of a named file holds a lock on it, so that any
// pid namespace can tell whether the owner is dead.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

#include "arch/process.h"

namespace moe_a2a {

// Closes its file descriptor.
class FileDescriptor {
 public:
  explicit FileDescriptor(int fd = -1) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;
  ~FileDescriptor() { reset(); }

  int get() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }
  void reset();

 private:
  int fd_;
};

// Where a file is: enough to find it and to verify what was found.
struct FileLocation {
  uint64_t pid_namespace = 0;
  uint64_t filesystem = 0;
  uint64_t inode = 0;
  int32_t fd = -1;
  int32_t has_name = 0;  // from the start, since its owner is not dumpable
};

// Zeroed, `nbytes` long, with its space reserved: a full /dev/shm must not kill a process later. Also removes names
// left by dead owners.
FileDescriptor make_shared_file(size_t nbytes, FileLocation* location);

// Opens the same file in another process. Calls `name_own_file` before it waits for the owner to name its file: the
// owner may be waiting for the same. Throws unless the file is the one at `location` and `nbytes` long.
FileDescriptor open_shared_file(const FileLocation& location, const ProcessIdentity& owner, size_t nbytes,
                                double timeout_seconds, const std::function<void()>& name_own_file);

// give_name() may be called again; remove_name() also if there is no name.
void give_name(const FileDescriptor& file, const FileLocation& location, const ProcessIdentity& owner);
void remove_name(const FileLocation& location, const ProcessIdentity& owner);

}  // namespace moe_a2a
