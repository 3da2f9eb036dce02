// Which kernel a digest stands for in this process.

#ifndef JAX_HOPPER_GEMM_FFI_KERNEL_TABLE_H_
#define JAX_HOPPER_GEMM_FFI_KERNEL_TABLE_H_

#include <string_view>

#include "cuda.h"
#include "xla/ffi/api/ffi.h"

namespace jax_hopper_gemm {

// Returns the kernel of `digest`. One that the process has not seen is asked of the resolver,
// which finds or builds the cubin of `spec` and loads it; kernels stay loaded for good.
xla::ffi::ErrorOr<CUkernel> FindKernel(std::string_view digest, std::string_view spec);

}  // namespace jax_hopper_gemm

extern "C" {

// Answers 0 and writes the CUkernel, or anything else and writes a zero-terminated message.
typedef int (*JhgResolver)(const char* digest, const char* spec, uint64_t* kernel_out,
                           char* error_out, size_t error_capacity);

// Sets what resolves unknown digests, on any thread; Python's callback takes the GIL itself.
void jhg_set_resolver(JhgResolver resolver);

}  // extern "C"

#endif  // JAX_HOPPER_GEMM_FFI_KERNEL_TABLE_H_
