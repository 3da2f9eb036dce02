#include "kernel_table.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <string>
#include <unordered_map>

namespace jax_hopper_gemm {
namespace {

namespace ffi = xla::ffi;

std::atomic<JhgResolver> resolver = nullptr;

struct KernelTable {
  std::mutex mutex;
  std::unordered_map<std::string, CUkernel> kernels;  // guarded by mutex
};

KernelTable& Table() {
  static auto& table = *new KernelTable;
  return table;
}

ffi::ErrorOr<CUkernel> Resolve(const std::string& digest, const std::string& spec) {
  const JhgResolver resolve = resolver.load();
  if (resolve == nullptr) {
    return ffi::Unexpected(ffi::Error(
        ffi::ErrorCode::kFailedPrecondition,
        "nothing in this process finds kernels. Import jax_hopper_gemm before the program loads."));
  }
  uint64_t kernel = 0;
  std::string message(4096, '\0');
  const int status = resolve(digest.c_str(), spec.c_str(), &kernel, message.data(), message.size());
  // A callback of ctypes that fails answers anything, and has written no kernel.
  if (status != 0 || kernel == 0) {
    message.resize(std::min(message.find('\0'), message.size()));
    if (message.empty()) message = "Python did not answer";
    return ffi::Unexpected(
        ffi::Error(ffi::ErrorCode::kFailedPrecondition, "the kernel cannot be loaded: " + message));
  }
  return reinterpret_cast<CUkernel>(kernel);
}

}  // namespace

ffi::ErrorOr<CUkernel> FindKernel(std::string_view digest, std::string_view spec) {
  KernelTable& table = Table();
  const std::string key(digest);
  {
    const std::lock_guard<std::mutex> lock(table.mutex);
    if (auto found = table.kernels.find(key); found != table.kernels.end()) return found->second;
  }
  // NOTE: the mutex is free while the resolver runs: it waits for the GIL, and a thread that holds
  // the GIL may be waiting here. Two threads may both ask; the resolver answers them alike.
  ffi::ErrorOr<CUkernel> kernel = Resolve(key, std::string(spec));
  if (kernel.has_error()) return kernel;
  const std::lock_guard<std::mutex> lock(table.mutex);
  return table.kernels.emplace(key, *kernel).first->second;
}

}  // namespace jax_hopper_gemm

void jhg_set_resolver(JhgResolver resolver) { jax_hopper_gemm::resolver.store(resolver); }
