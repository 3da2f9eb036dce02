// The launch plan: all of a launch but its pointers, decoded from the int64 words in the program.

#ifndef JAX_HOPPER_GEMM_FFI_PLAN_H_
#define JAX_HOPPER_GEMM_FFI_PLAN_H_

#include <array>
#include <cstdint>
#include <vector>

#include "cuda.h"
#include "xla/ffi/api/ffi.h"

namespace jax_hopper_gemm {

// Bounds on a plan; they size the arrays that a launch keeps on its stack.
inline constexpr int kMaxParams = 64;
inline constexpr int kMaxTensorMaps = 28;
inline constexpr int kMaxCleared = 16;
inline constexpr int kMaxBuffers = 256;
inline constexpr int kMaxRank = 5;

// A tiled tensor map over one buffer; dimension 0 is contiguous.
struct TensorMapPlan {
  int buffer;
  int64_t offset;  // bytes from the buffer's start
  CUtensorMapDataType dtype;
  CUtensorMapSwizzle swizzle;
  int rank;
  std::array<cuuint64_t, kMaxRank> dims;         // elements
  std::array<cuuint64_t, kMaxRank - 1> strides;  // bytes, from dimension 1 on
  std::array<cuuint32_t, kMaxRank> box;          // elements
};

// A kernel parameter. What `value` is depends on the kind.
struct Param {
  enum class Kind { kTensorMap = 0, kInt32 = 1, kPointer = 2 };
  Kind kind;
  int32_t value;  // an index of Plan::tensor_maps; the scalar itself; a buffer
};

// A workspace that is set to zero before each launch.
struct Cleared {
  int buffer;
  int64_t words;  // of 32 bits
};

struct Plan {
  std::array<unsigned, 3> grid;  // in CTAs
  std::array<unsigned, 3> cluster;
  unsigned threads;
  unsigned smem_bytes;
  std::vector<Cleared> cleared;
  std::vector<Param> params;
  std::vector<TensorMapPlan> tensor_maps;
  // By number, how many bytes of each buffer the launch is known to touch: those of tensor maps and
  // those that are cleared. What a kernel reads through a pointer, only it knows.
  std::vector<int64_t> reach;
};

// Returns the plan that `LaunchPlan.encode` in jax_hopper_gemm/launch/plan.py wrote, or an error
// that names the first word that does not fit.
xla::ffi::ErrorOr<Plan> DecodePlan(xla::ffi::Span<const int64_t> words);

}  // namespace jax_hopper_gemm

#endif  // JAX_HOPPER_GEMM_FFI_PLAN_H_
