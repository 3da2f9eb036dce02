// Linked with the FFI library's sources, makes one of its allocations fail.

#include <atomic>
#include <cstdlib>
#include <new>

namespace {
std::atomic<int> left = 0;  // allocations until one fails; 0: none does
}  // namespace

// Makes the `count`-th allocation from now on fail, and returns how many were left of the last.
extern "C" int jhg_fail_allocation(int count) { return left.exchange(count); }

void* operator new(size_t size) {
  if (left > 0 && --left == 0) throw std::bad_alloc();
  return std::malloc(size);
}

void operator delete(void* pointer) noexcept { std::free(pointer); }
void operator delete(void* pointer, size_t) noexcept { std::free(pointer); }
