// The CUDA driver, opened when it is first needed: this library loads on a machine that has none.

#ifndef JAX_HOPPER_GEMM_FFI_DRIVER_H_
#define JAX_HOPPER_GEMM_FFI_DRIVER_H_

#include <string>

#include "cuda.h"
#include "xla/ffi/api/ffi.h"

namespace jax_hopper_gemm {

// The entry points in use. cuda.h renames some of them to a version ("cuCtxPushCurrent_v2"); the
// members and the symbols looked up follow it.
#define JHG_DRIVER_FUNCTIONS(X) \
  X(cuGetErrorName)             \
  X(cuGetErrorString)           \
  X(cuCtxGetCurrent)            \
  X(cuCtxPushCurrent)           \
  X(cuCtxPopCurrent)            \
  X(cuDevicePrimaryCtxRetain)   \
  X(cuDevicePrimaryCtxRelease)  \
  X(cuKernelGetParamInfo)       \
  X(cuTensorMapEncodeTiled)     \
  X(cuTensorMapReplaceAddress)  \
  X(cuMemsetD32Async)           \
  X(cuLaunchKernelEx)

struct Driver {
#define JHG_DECLARE(function) decltype(&::function) function = nullptr;
  JHG_DRIVER_FUNCTIONS(JHG_DECLARE)
#undef JHG_DECLARE

  // Returns the driver, opened once a process: libcuda.so.1, or the file that the environment
  // variable JAX_HOPPER_GEMM_LIBCUDA names. An error if it cannot be opened or is too old.
  static xla::ffi::ErrorOr<const Driver*> Get();

  // Returns what "call" answered as an error: "cuX failed: CUDA_ERROR_Y (explanation)DETAIL".
  xla::ffi::Error Failure(const char* call, CUresult result, const std::string& detail) const;
};

// Makes a context current on this thread while it lives, if none is: cuTensorMapEncodeTiled and
// cuKernelGetParamInfo want one, and XLA may load an executable on a thread that has none.
class AnyContext {
 public:
  explicit AnyContext(const Driver& driver);
  ~AnyContext();
  AnyContext(const AnyContext&) = delete;
  AnyContext& operator=(const AnyContext&) = delete;

 private:
  const Driver& driver_;
  CUcontext pushed_ = nullptr;
};

}  // namespace jax_hopper_gemm

#endif  // JAX_HOPPER_GEMM_FFI_DRIVER_H_
