#include "driver.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>

namespace jax_hopper_gemm {
namespace {

namespace ffi = xla::ffi;

constexpr CUdevice kFirstDevice = 0;

// Returns text with what is not ASCII in hexadecimal: Python reads messages as UTF-8, and paths
// need not be.
std::string Ascii(const std::string& text) {
  std::string ascii;
  for (const unsigned char byte : text) {
    char escaped[5] = {static_cast<char>(byte)};
    if (byte >= 0x80) std::snprintf(escaped, sizeof(escaped), "\\x%02x", byte);
    ascii += escaped;
  }
  return ascii;
}

ffi::ErrorOr<const Driver*> Open() {
  const char* override_path = std::getenv("JAX_HOPPER_GEMM_LIBCUDA");
  const bool overridden = override_path != nullptr && *override_path != '\0';
  const char* path = overridden ? override_path : "libcuda.so.1";
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* way_out =
        overridden ? ". JAX_HOPPER_GEMM_LIBCUDA names it: name a driver's library, or unset it."
                   : ". Install the NVIDIA driver, or in a container pass the GPU through "
                     "(--gpus all).";
    return ffi::Unexpected(
        ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                   "the CUDA driver cannot be opened: " + Ascii(dlerror()) + way_out));
  }
  auto* driver = new Driver;  // lives as long as the process
  const char* missing = nullptr;
#define JHG_STRING(text) #text
#define JHG_LOOK_UP(function)                                                             \
  driver->function =                                                                      \
      reinterpret_cast<decltype(driver->function)>(dlsym(library, JHG_STRING(function))); \
  if (driver->function == nullptr) missing = JHG_STRING(function);
  JHG_DRIVER_FUNCTIONS(JHG_LOOK_UP)
#undef JHG_LOOK_UP
#undef JHG_STRING
  if (missing != nullptr) {
    return ffi::Unexpected(ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                                      Ascii(path) + " lacks " + missing +
                                          ". Update the NVIDIA driver: CUDA 12.4 (550) or newer."));
  }
  return driver;
}

}  // namespace

ffi::ErrorOr<const Driver*> Driver::Get() {
  static const auto& driver = *new ffi::ErrorOr<const Driver*>(Open());
  return driver;
}

ffi::Error Driver::Failure(const char* call, CUresult result, const std::string& detail) const {
  const char* name = nullptr;
  const char* text = nullptr;
  const std::string number = "CUresult " + std::to_string(result);
  if (cuGetErrorName(result, &name) != CUDA_SUCCESS) name = number.c_str();
  if (cuGetErrorString(result, &text) != CUDA_SUCCESS) text = "no description";
  const ffi::ErrorCode code = result == CUDA_ERROR_OUT_OF_MEMORY
                                  ? ffi::ErrorCode::kResourceExhausted
                                  : ffi::ErrorCode::kInternal;
  return ffi::Error(code, std::string(call) + " failed: " + name + " (" + text + ")" + detail);
}

// A context that cannot be made current is reported by the call that needs it.
AnyContext::AnyContext(const Driver& driver) : driver_(driver) {
  CUcontext context = nullptr;
  if (driver.cuCtxGetCurrent(&context) != CUDA_SUCCESS || context != nullptr) return;
  if (driver.cuDevicePrimaryCtxRetain(&context, kFirstDevice) != CUDA_SUCCESS) return;
  if (driver.cuCtxPushCurrent(context) == CUDA_SUCCESS) {
    pushed_ = context;
  } else {
    driver.cuDevicePrimaryCtxRelease(kFirstDevice);
  }
}

AnyContext::~AnyContext() {
  if (pushed_ == nullptr) return;
  driver_.cuCtxPopCurrent(&pushed_);
  driver_.cuDevicePrimaryCtxRelease(kFirstDevice);
}

}  // namespace jax_hopper_gemm
