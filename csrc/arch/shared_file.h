// A nameless file in /dev/shm that other processes can map: nothing is left behind if every process that knows it is
// killed.
//
// Peers open it as /proc/<pid>/fd/<n> of its owner. If they cannot (different pid namespace, or an owner that is not
// dumpable), the file gets a name until all have mapped it. The owner of a named file holds a lock on it, so that any
// pid namespace can tell whether the owner is dead.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "arch/process.h"

namespace moe_a2a {

// Closes its file descriptor.
class FileDescriptor {
 public:
  explicit FileDescriptor(int fd = -1) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(other.release()) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;
  ~FileDescriptor() { reset(); }

  int get() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }
  void reset();

 private:
  int release();

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
template <class NameOwnFile>
FileDescriptor open_shared_file(const FileLocation& location, const ProcessIdentity& owner, size_t nbytes,
                                double timeout_seconds, NameOwnFile name_own_file);

bool can_open_without_a_name(const FileLocation& location);
FileDescriptor open_by_process(const FileLocation& location, const ProcessIdentity& owner, size_t nbytes);
// Waits until the file has its name.
FileDescriptor open_by_name(const FileLocation& location, const ProcessIdentity& owner, size_t nbytes,
                            double timeout_seconds);

// give_name() may be called again; remove_name() also if there is no name.
void give_name(const FileDescriptor& file, const FileLocation& location, const ProcessIdentity& owner);
void remove_name(const FileLocation& location, const ProcessIdentity& owner);

template <class NameOwnFile>
FileDescriptor open_shared_file(const FileLocation& location, const ProcessIdentity& owner, size_t nbytes,
                                double timeout_seconds, NameOwnFile name_own_file) {
  if (can_open_without_a_name(location)) return open_by_process(location, owner, nbytes);
  if (location.has_name == 0) name_own_file();
  return open_by_name(location, owner, nbytes, timeout_seconds);
}

}  // namespace moe_a2a
