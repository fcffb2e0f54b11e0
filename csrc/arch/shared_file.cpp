#include "arch/shared_file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>

#include "arch/interrupt.h"
#include "arch/out_of_memory.h"

namespace moe_a2a {
namespace {

constexpr const char* kDirectory = "/dev/shm";
constexpr const char* kPrefix = "moe_a2a.heap.";

[[noreturn]] void fail(const std::string& what, int error) {
  throw std::runtime_error(what + ": " + std::strerror(error));
}

[[noreturn]] void fail_for_space(size_t nbytes) {
  struct statvfs status{};
  std::string available = "unknown";
  if (statvfs(kDirectory, &status) == 0) {
    available = std::to_string(static_cast<unsigned long long>(status.f_bavail) * status.f_frsize);
  }
  throw OutOfMemory("the symmetric heap needs " + std::to_string(nbytes) + " bytes of " + kDirectory + ", which has " +
                    available + " left; enlarge " + kDirectory + " (in a container: --shm-size)");
}

[[noreturn]] void fail_for_file_size(size_t nbytes) {
  struct rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || nbytes <= limit.rlim_cur) fail_for_space(nbytes);
  throw OutOfMemory("the symmetric heap needs " + std::to_string(nbytes) + " bytes of " + kDirectory +
                    ", and a file of this process may have " + std::to_string(limit.rlim_cur) +
                    " (ulimit -f); raise that limit");
}

uint64_t this_pid_namespace() {
  struct stat status{};
  return stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

std::string path_in_proc(const std::string& pid, int fd) { return "/proc/" + pid + "/fd/" + std::to_string(fd); }

std::string name_of(const FileLocation& location, const ProcessIdentity& owner) {
  char identity[64];
  std::snprintf(identity, sizeof(identity), "%016llx%016llx", static_cast<unsigned long long>(owner.word[0]),
                static_cast<unsigned long long>(owner.word[1]));
  return std::string(kDirectory) + "/" + kPrefix + std::to_string(owner.pid) + "." + identity + "." +
         std::to_string(location.inode);
}

// A file that can be locked has no living owner: owners hold the lock.
void remove_names_of_dead_owners() {
  DIR* directory = opendir(kDirectory);
  if (directory == nullptr) return;
  while (const dirent* entry = readdir(directory)) {
    if (std::strncmp(entry->d_name, kPrefix, std::strlen(kPrefix)) != 0) continue;
    const std::string path = std::string(kDirectory) + "/" + entry->d_name;
    const FileDescriptor file(open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
    if (file.is_open() && flock(file.get(), LOCK_EX | LOCK_NB) == 0) unlink(path.c_str());
  }
  closedir(directory);
}

// Some file systems have no nameless files; there the name lasts for two system calls.
FileDescriptor open_nameless() {
  FileDescriptor file(open(kDirectory, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  if (file.is_open() || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)) return file;
  std::string path = std::string(kDirectory) + "/moe_a2a.XXXXXX";
  file = FileDescriptor(mkostemp(path.data(), O_CLOEXEC));
  if (file.is_open()) unlink(path.c_str());
  return file;
}

std::string describe(const ProcessIdentity& owner) { return "the heap of process " + std::to_string(owner.pid); }

bool is_at(const struct stat& status, const FileLocation& location) {
  return S_ISREG(status.st_mode) && status.st_dev == location.filesystem && status.st_ino == location.inode;
}

// Checked before it is opened: opening a device or a pipe can have side effects, or block.
FileDescriptor open_checked(const std::string& path, const FileLocation& location, const ProcessIdentity& owner,
                            size_t nbytes) {
  struct stat status{};
  if (stat(path.c_str(), &status) != 0) return FileDescriptor();
  if (!is_at(status, location)) {
    throw std::runtime_error(describe(owner) + " is gone: that process has ended or closed its object");
  }
  FileDescriptor file(open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!file.is_open()) return file;
  if (fstat(file.get(), &status) != 0 || !is_at(status, location)) {
    throw std::runtime_error(describe(owner) + " is gone: that process has ended or closed its object");
  }
  if (static_cast<uint64_t>(status.st_size) != nbytes) {
    throw std::invalid_argument(describe(owner) + " has " + std::to_string(status.st_size) + " bytes, expected " +
                                std::to_string(nbytes) + "; pass the handle of the object that this group makes");
  }
  return file;
}

FileDescriptor open_by_process(const FileLocation& location, const ProcessIdentity& owner, size_t nbytes) {
  const std::string path = path_in_proc(std::to_string(owner.pid), location.fd);
  FileDescriptor file = open_checked(path, location, owner, nbytes);
  if (file.is_open()) return file;
  if (errno == EACCES || errno == EPERM) {
    fail("opening " + path + "; run all ranks as the same user, and without capabilities of their own", errno);
  }
  fail("opening " + describe(owner) + " (it has ended or closed its object)", errno);
}

// Waits until the file has its name.
FileDescriptor open_by_name(const FileLocation& location, const ProcessIdentity& owner, size_t nbytes,
                            double timeout_seconds) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_seconds);
  while (true) {
    FileDescriptor file = open_checked(name_of(location, owner), location, owner, nbytes);
    if (file.is_open()) return file;
    if (errno != ENOENT) fail("opening " + describe(owner), errno);
    if (is_host_interrupted()) throw Interrupted("interrupted while waiting for " + describe(owner));
    if (std::chrono::steady_clock::now() > deadline) {
      throw std::runtime_error(describe(owner) + " did not appear in " + kDirectory + " within " +
                               std::to_string(timeout_seconds) +
                               " s; ranks in different pid namespaces meet there: let their containers share "
                               "/dev/shm (--ipc), or let them share one pid namespace");
    }
    usleep(1000);
  }
}

}  // namespace

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

void FileDescriptor::reset() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

FileDescriptor make_shared_file(size_t nbytes, FileLocation* location) {
  remove_names_of_dead_owners();
  FileDescriptor file = open_nameless();
  if (!file.is_open()) fail(std::string("opening the symmetric heap in ") + kDirectory, errno);
  int error = EINTR;
  while (error == EINTR) error = posix_fallocate(file.get(), 0, static_cast<off_t>(nbytes));
  if (error == EFBIG) fail_for_file_size(nbytes);
  if (error == ENOSPC || error == ENOMEM) fail_for_space(nbytes);
  if (error != 0) fail("posix_fallocate of the symmetric heap", error);
  struct stat status{};
  if (fstat(file.get(), &status) != 0) fail("fstat of the symmetric heap", errno);
  *location = {.pid_namespace = this_pid_namespace(),
               .filesystem = status.st_dev,
               .inode = status.st_ino,
               .fd = file.get(),
               .has_name = prctl(PR_GET_DUMPABLE) == 1 ? 0 : 1};
  if (location->has_name != 0) give_name(file, *location, this_process());
  return file;
}

FileDescriptor open_shared_file(const FileLocation& location, const ProcessIdentity& owner, size_t nbytes,
                                double timeout_seconds, const std::function<void()>& name_own_file) {
  const bool is_same_namespace = location.pid_namespace != 0 && location.pid_namespace == this_pid_namespace();
  if (location.has_name == 0 && is_same_namespace) return open_by_process(location, owner, nbytes);
  if (location.has_name == 0) name_own_file();
  return open_by_name(location, owner, nbytes, timeout_seconds);
}

void give_name(const FileDescriptor& file, const FileLocation& location, const ProcessIdentity& owner) {
  const std::string path = name_of(location, owner);
  if (flock(file.get(), LOCK_EX | LOCK_NB) != 0) fail("locking the symmetric heap", errno);
  if (linkat(AT_FDCWD, path_in_proc("self", file.get()).c_str(), AT_FDCWD, path.c_str(), AT_SYMLINK_FOLLOW) != 0 &&
      errno != EEXIST) {
    fail("naming the symmetric heap, for ranks in another pid namespace (" + path + ")", errno);
  }
}

void remove_name(const FileLocation& location, const ProcessIdentity& owner) {
  unlink(name_of(location, owner).c_str());
}

}  // namespace moe_a2a
