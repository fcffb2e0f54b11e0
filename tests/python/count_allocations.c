// Preloaded into a Python process: counts what one shared object allocates, by the address of the caller.
//
// The real allocator is glibc's, called by its own names, so no dlsym (which allocates) is needed. C++ operators new are
// counted here too: otherwise their caller would be the C++ library.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

extern void* __memset_chk(void*, int, size_t, size_t);
extern void* __libc_malloc(size_t);
extern void* __libc_calloc(size_t, size_t);
extern void* __libc_realloc(void*, size_t);
extern void* __libc_memalign(size_t, size_t);

enum { kMaxCallers = 64 };

static uintptr_t watched_begin, watched_end;
static _Atomic int counting;
static _Atomic long num_allocations, num_tensors, num_threads_started, num_memset_bytes;
static _Atomic uintptr_t callers[kMaxCallers];

static void note_allocation(void* caller) {
  const uintptr_t address = (uintptr_t)caller;
  if (!atomic_load(&counting) || address < watched_begin || address >= watched_end) return;
  const long index = atomic_fetch_add(&num_allocations, 1);
  if (index < kMaxCallers) atomic_store(&callers[index], address - watched_begin);
}

#define CALLER __builtin_return_address(0)

void* malloc(size_t size) {
  note_allocation(CALLER);
  return __libc_malloc(size);
}
void* calloc(size_t count, size_t size) {
  note_allocation(CALLER);
  return __libc_calloc(count, size);
}
void* realloc(void* old, size_t size) {
  note_allocation(CALLER);
  return __libc_realloc(old, size);
}
void* memalign(size_t alignment, size_t size) {
  note_allocation(CALLER);
  return __libc_memalign(alignment, size);
}
void* aligned_alloc(size_t alignment, size_t size) {
  note_allocation(CALLER);
  return __libc_memalign(alignment, size);
}
int posix_memalign(void** result, size_t alignment, size_t size) {  // what PyTorch takes a CPU tensor's memory from
  note_allocation(CALLER);
  if (atomic_load(&counting)) atomic_fetch_add(&num_tensors, 1);
  *result = __libc_memalign(alignment, size);
  return *result == NULL ? 12 : 0;  // ENOMEM
}
void* _Znwm(size_t size) {  // operator new
  note_allocation(CALLER);
  return __libc_malloc(size);
}
void* _Znam(size_t size) {  // operator new[]
  note_allocation(CALLER);
  return __libc_malloc(size);
}
void* _ZnwmSt11align_val_t(size_t size, size_t alignment) {
  note_allocation(CALLER);
  return __libc_memalign(alignment, size);
}

void* memset(void* target, int value, size_t size) {
  const uintptr_t address = (uintptr_t)CALLER;
  const uintptr_t above_this_frame = (uintptr_t)target - (uintptr_t)__builtin_frame_address(0);
  const int is_on_stack = above_this_frame < (1 << 16);  // a sum that starts at zero clears no memory
  if (atomic_load(&counting) && !is_on_stack && address >= watched_begin && address < watched_end) {
    atomic_fetch_add(&num_memset_bytes, (long)size);
  }
  return __memset_chk(target, value, size, size);  // glibc's own, under another name
}

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*), void* argument) {
  static int (*real)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  if (real == NULL) real = dlsym(RTLD_NEXT, "pthread_create");
  if (atomic_load(&counting)) atomic_fetch_add(&num_threads_started, 1);
  return real(thread, attributes, start, argument);
}

static int find_object(struct dl_phdr_info* info, size_t size, void* name) {
  (void)size;
  if (info->dlpi_name == NULL || strstr(info->dlpi_name, name) == NULL) return 0;
  watched_begin = info->dlpi_addr;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const uintptr_t end = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr + info->dlpi_phdr[i].p_memsz;
    if (info->dlpi_phdr[i].p_type == PT_LOAD && end > watched_end) watched_end = end;
  }
  return 1;
}

// For ctypes. Returns 1 when the shared object is loaded.
int watch(const char* name) { return dl_iterate_phdr(find_object, (void*)name); }
void count(int on) { atomic_store(&counting, on); }
long allocations(void) { return atomic_load(&num_allocations); }
long tensors(void) { return atomic_load(&num_tensors); }
long memset_bytes(void) { return atomic_load(&num_memset_bytes); }
long threads_started(void) { return atomic_load(&num_threads_started); }
unsigned long caller(int index) { return atomic_load(&callers[index]); }
