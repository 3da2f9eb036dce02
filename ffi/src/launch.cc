#include "launch.h"

#include <array>
#include <cstdint>
#include <utility>

namespace jax_hopper_gemm {
namespace {

namespace ffi = xla::ffi;

constexpr uintptr_t kTmaAlignment = 16;  // bytes, of every address in a tensor map

// Any address that is not null and is aligned: it is replaced before each launch.
void* const kPlaceholder = reinterpret_cast<void*>(uintptr_t{1} << 20);

constexpr std::array<cuuint32_t, kMaxRank> kUnitStrides = {1, 1, 1, 1, 1};

size_t ParamBytes(Param::Kind kind) {
  if (kind == Param::Kind::kTensorMap) return sizeof(CUtensorMap);
  return kind == Param::Kind::kInt32 ? sizeof(int32_t) : sizeof(CUdeviceptr);
}

template <typename T>
std::string Join(const T* values, size_t count) {
  std::string text;
  for (size_t i = 0; i < count; ++i) text += (i ? "x" : "") + std::to_string(values[i]);
  return text;
}

// Buffers are numbered operands first, then results.
ffi::AnyBuffer BufferAt(const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
                        size_t buffer) {
  if (buffer < operands.size()) return *operands.get<ffi::AnyBuffer>(buffer);
  return **results.get<ffi::AnyBuffer>(buffer - operands.size());
}

}  // namespace

ffi::TypeId Launch::id = {};

ffi::ErrorOr<std::unique_ptr<Launch>> Launch::Create(const Driver& driver, std::string_view name,
                                                     CUkernel kernel, Plan plan) {
  std::unique_ptr<Launch> launch(new Launch(driver, name, kernel, std::move(plan)));
  if (ffi::Error error = launch->CheckParams(); error.failure()) return ffi::Unexpected(error);
  if (ffi::Error error = launch->EncodeTensorMaps(); error.failure()) return ffi::Unexpected(error);
  return launch;
}

ffi::Error Launch::CheckParams() const {
  const size_t expected = plan_.params.size();
  for (size_t i = 0; i <= expected; ++i) {
    size_t offset = 0;
    size_t bytes = 0;
    const CUresult result = driver_.cuKernelGetParamInfo(kernel_, i, &offset, &bytes);
    const bool present = result == CUDA_SUCCESS;
    if (!present && result != CUDA_ERROR_INVALID_VALUE) {
      return driver_.Failure("cuKernelGetParamInfo", result, "");
    }
    if (present != (i < expected)) {
      return ffi::Error::InvalidArgument(
          "the kernel takes " +
          (present ? "more than " + std::to_string(expected) : std::to_string(i)) +
          " parameters, the launch plan has " + std::to_string(expected));
    }
    if (present && bytes != ParamBytes(plan_.params[i].kind)) {
      return ffi::Error::InvalidArgument("the kernel's parameter " + std::to_string(i) + " has " +
                                         std::to_string(bytes) + " bytes, the launch plan's has " +
                                         std::to_string(ParamBytes(plan_.params[i].kind)));
    }
  }
  return ffi::Error::Success();
}

ffi::Error Launch::EncodeTensorMaps() {
  tensor_maps_.resize(plan_.tensor_maps.size());
  for (size_t i = 0; i < tensor_maps_.size(); ++i) {
    const TensorMapPlan& map = plan_.tensor_maps[i];
    const CUresult result = driver_.cuTensorMapEncodeTiled(
        &tensor_maps_[i], map.dtype, map.rank, kPlaceholder, map.dims.data(), map.strides.data(),
        map.box.data(), kUnitStrides.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, map.swizzle,
        CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) {
      return driver_.Failure("cuTensorMapEncodeTiled", result,
                             "; tensor map of buffer " + std::to_string(map.buffer) + ": extents " +
                                 Join(map.dims.data(), map.rank) + ", strides in bytes " +
                                 Join(map.strides.data(), map.rank - 1) + ", box " +
                                 Join(map.box.data(), map.rank));
    }
  }
  return ffi::Error::Success();
}

ffi::Error Launch::CheckBuffers(const ffi::RemainingArgs& operands,
                                const ffi::RemainingRets& results) const {
  const std::vector<int64_t>& reach = plan_.reach;
  if (operands.size() + results.size() < reach.size()) {
    return ffi::Error::InvalidArgument("the launch plan refers to " + std::to_string(reach.size()) +
                                       " buffers, the call has " +
                                       std::to_string(operands.size() + results.size()));
  }
  for (size_t i = 0; i < reach.size(); ++i) {
    const size_t bytes = BufferAt(operands, results, i).size_bytes();
    if (bytes < static_cast<size_t>(reach[i])) {
      return ffi::Error::InvalidArgument(
          "buffer " + std::to_string(i) + " has " + std::to_string(bytes) +
          " bytes, the launch plan reaches " + std::to_string(reach[i]));
    }
  }
  return ffi::Error::Success();
}

ffi::Error Launch::Run(CUstream stream, const ffi::RemainingArgs& operands,
                       const ffi::RemainingRets& results) const {
  if (!fits_.load(std::memory_order_relaxed)) {
    ffi::Error error = CheckBuffers(operands, results);
    if (error.failure()) return error;
    fits_.store(true, std::memory_order_relaxed);
  }
  for (const Cleared& cleared : plan_.cleared) {
    const ffi::AnyBuffer buffer = BufferAt(operands, results, cleared.buffer);
    const CUresult result =
        driver_.cuMemsetD32Async(reinterpret_cast<CUdeviceptr>(buffer.untyped_data()),
                                 /*ui=*/0, cleared.words, stream);
    if (result != CUDA_SUCCESS) return driver_.Failure("cuMemsetD32Async", result, "");
  }

  // What the kernel's parameters point to until cuLaunchKernelEx has copied them.
  std::array<CUtensorMap, kMaxTensorMaps> tensor_maps;
  std::array<void*, kMaxParams> pointers;
  std::array<void*, kMaxParams> params;
  for (size_t i = 0; i < plan_.params.size(); ++i) {
    const Param& param = plan_.params[i];
    switch (param.kind) {
      case Param::Kind::kTensorMap: {
        const TensorMapPlan& planned = plan_.tensor_maps[param.value];
        const int buffer = planned.buffer;
        const uintptr_t address =
            reinterpret_cast<uintptr_t>(BufferAt(operands, results, buffer).untyped_data()) +
            planned.offset;
        if (address % kTmaAlignment != 0) {
          return ffi::Error::InvalidArgument("the address of buffer " + std::to_string(buffer) +
                                             " is not a multiple of 16");
        }
        CUtensorMap& map = tensor_maps[param.value];
        map = tensor_maps_[param.value];
        const CUresult result =
            driver_.cuTensorMapReplaceAddress(&map, reinterpret_cast<void*>(address));
        if (result != CUDA_SUCCESS) return driver_.Failure("cuTensorMapReplaceAddress", result, "");
        params[i] = &map;
        break;
      }
      case Param::Kind::kInt32:
        params[i] = const_cast<int32_t*>(&param.value);  // the driver only reads it
        break;
      case Param::Kind::kPointer:
        pointers[i] = BufferAt(operands, results, param.value).untyped_data();
        params[i] = &pointers[i];
        break;
    }
  }
  return Enqueue(stream, params.data());
}

ffi::Error Launch::Enqueue(CUstream stream, void** params) const {
  const std::array<unsigned, 3>& grid = plan_.grid;
  const std::array<unsigned, 3>& cluster = plan_.cluster;
  CUlaunchAttribute attribute = {};
  attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
  attribute.value.clusterDim = {cluster[0], cluster[1], cluster[2]};
  CUlaunchConfig config = {};
  config.gridDimX = grid[0];
  config.gridDimY = grid[1];
  config.gridDimZ = grid[2];
  config.blockDimX = plan_.threads;
  config.blockDimY = 1;
  config.blockDimZ = 1;
  config.sharedMemBytes = plan_.smem_bytes;
  config.hStream = stream;
  config.attrs = &attribute;
  config.numAttrs = cluster[0] * cluster[1] * cluster[2] > 1 ? 1 : 0;
  const CUresult result = driver_.cuLaunchKernelEx(&config, reinterpret_cast<CUfunction>(kernel_),
                                                   params, /*extra=*/nullptr);
  if (result == CUDA_SUCCESS) return ffi::Error::Success();
  return driver_.Failure("cuLaunchKernelEx", result,
                         "; grid " + Join(grid.data(), 3) + ", cluster " + Join(cluster.data(), 3) +
                             ", " + std::to_string(plan_.threads) + " threads, " +
                             std::to_string(plan_.smem_bytes) + " bytes of shared memory");
}

}  // namespace jax_hopper_gemm
