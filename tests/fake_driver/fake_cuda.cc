// A stand-in for libcuda.so.1: it records calls, one line of JSON each, and fails where told to.
// Tensor maps of its making hold their address in the first 8 bytes and the rank in the next.

#include <atomic>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "cuda.h"

namespace {

struct Fake {
  std::mutex mutex;
  std::atomic<bool> recording = true;
  std::atomic<uint32_t> one_in = 0;  // of so many calls that are not recorded, one fails; 0: none
  std::string log;
  std::map<std::string, CUresult> failures;
  int fails_after = -1;  // so many calls, one does; negative: none
  CUresult failure = CUDA_SUCCESS;
  std::map<uint64_t, std::vector<size_t>> kernels;  // handle to parameter sizes
};

Fake& State() {
  static auto& fake = *new Fake;
  return fake;
}

thread_local CUcontext current_context = nullptr;

uint64_t Number(const volatile void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

template <typename T>
std::string List(const T* values, size_t count) {
  std::ostringstream text;
  for (size_t i = 0; i < count; ++i) text << (i ? "," : "[") << values[i];
  text << (count ? "]" : "[]");
  return text.str();
}

// A name and a value as they stand in the log.
struct Field {
  template <typename T>
  Field(const char* name, const T& value) {
    std::ostringstream stream;
    stream << ",\"" << name << "\":" << value;
    text = stream.str();
  }
  std::string text;
};

// Answers a call that is not recorded.
CUresult AtRandom() {
  const uint32_t one_in = State().one_in;
  thread_local uint32_t random = 1;
  random = random * 1664525 + 1013904223;
  if (one_in == 0 || (random >> 8) % one_in != 0) return CUDA_SUCCESS;
  return random >> 31 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_UNKNOWN;
}

// Records `call` with its fields and returns what it is told to answer.
CUresult Answer(const std::string& call, std::initializer_list<Field> fields) {
  Fake& fake = State();
  if (!fake.recording) return AtRandom();
  const std::lock_guard<std::mutex> lock(fake.mutex);
  fake.log += "{\"call\":\"" + call + "\"";
  for (const Field& field : fields) fake.log += field.text;
  fake.log += "}\n";
  if (fake.fails_after >= 0 && fake.fails_after-- == 0) return fake.failure;
  auto failure = fake.failures.find(call);
  return failure == fake.failures.end() ? CUDA_SUCCESS : failure->second;
}

}  // namespace

extern "C" {

void fake_reset() {
  Fake& fake = State();
  const std::lock_guard<std::mutex> lock(fake.mutex);
  fake.recording = true;
  fake.log.clear();
  fake.failures.clear();
  fake.fails_after = -1;
}

void fake_stop_recording() { State().recording = false; }

// From now on calls are not recorded, and one in so many fails.
void fake_fail_at_random(uint32_t one_in) {
  fake_stop_recording();
  State().one_in = one_in;
}

void fake_fail(const char* call, int result) {
  const std::lock_guard<std::mutex> lock(State().mutex);
  State().failures[call] = static_cast<CUresult>(result);
}

// Makes one call fail, after so many others.
void fake_fail_after(int calls, int result) {
  const std::lock_guard<std::mutex> lock(State().mutex);
  State().fails_after = calls;
  State().failure = static_cast<CUresult>(result);
}

void fake_add_kernel(uint64_t handle, const size_t* param_bytes, size_t count) {
  const std::lock_guard<std::mutex> lock(State().mutex);
  State().kernels[handle].assign(param_bytes, param_bytes + count);
}

const char* fake_log() {
  const std::lock_guard<std::mutex> lock(State().mutex);
  return State().log.c_str();
}

CUresult cuGetErrorName(CUresult error, const char** text) {
  *text = error == CUDA_ERROR_OUT_OF_MEMORY   ? "CUDA_ERROR_OUT_OF_MEMORY"
          : error == CUDA_ERROR_LAUNCH_FAILED ? "CUDA_ERROR_LAUNCH_FAILED"
                                              : nullptr;
  return *text != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = error == CUDA_ERROR_OUT_OF_MEMORY   ? "out of memory"
          : error == CUDA_ERROR_LAUNCH_FAILED ? "unspecified launch failure"
                                              : nullptr;
  return *text != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = current_context;
  return Answer("cuCtxGetCurrent", {});
}

CUresult cuCtxPushCurrent(CUcontext context) {
  const CUresult result = Answer("cuCtxPushCurrent", {});
  if (result == CUDA_SUCCESS) current_context = context;
  return result;
}

CUresult cuCtxPopCurrent(CUcontext* context) {
  *context = current_context;
  current_context = nullptr;
  return Answer("cuCtxPopCurrent", {});
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = reinterpret_cast<CUcontext>(0xC0DE);
  return Answer("cuDevicePrimaryCtxRetain", {{"device", device}});
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  return Answer("cuDevicePrimaryCtxRelease", {{"device", device}});
}

CUresult cuKernelGetParamInfo(CUkernel kernel, size_t index, size_t* offset, size_t* size) {
  const CUresult result = Answer("cuKernelGetParamInfo",
                                 {{"index", index}, {"has_context", current_context != nullptr}});
  if (result != CUDA_SUCCESS) return result;
  const std::lock_guard<std::mutex> lock(State().mutex);
  const std::vector<size_t>& sizes = State().kernels[Number(kernel)];
  if (index >= sizes.size()) return CUDA_ERROR_INVALID_VALUE;
  *offset = 0;
  *size = sizes[index];
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType dtype, cuuint32_t rank,
                                void* address, const cuuint64_t* dims, const cuuint64_t* strides,
                                const cuuint32_t* box, const cuuint32_t* element_strides,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  std::memset(map, 0, sizeof(*map));
  map->opaque[0] = Number(address);
  map->opaque[1] = rank;
  return Answer("cuTensorMapEncodeTiled", {{"has_context", current_context != nullptr},
                                           {"misalignment", Number(map) % 64},
                                           {"dtype", dtype},
                                           {"dims", List(dims, rank)},
                                           {"strides", List(strides, rank - 1)},
                                           {"box", List(box, rank)},
                                           {"element_strides", List(element_strides, rank)},
                                           {"interleave", interleave},
                                           {"swizzle", swizzle},
                                           {"promotion", promotion},
                                           {"fill", fill}});
}

CUresult cuTensorMapReplaceAddress(CUtensorMap* map, void* address) {
  map->opaque[0] = Number(address);
  if (!State().recording) return AtRandom();
  return Answer("cuTensorMapReplaceAddress",
                {{"misalignment", Number(map) % 64}, {"address", Number(address)}});
}

CUresult cuMemsetD32Async(CUdeviceptr address, unsigned value, size_t words, CUstream stream) {
  if (!State().recording) return AtRandom();
  return Answer(
      "cuMemsetD32Async",
      {{"address", address}, {"value", value}, {"words", words}, {"stream", Number(stream)}});
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction kernel, void** params,
                          void** extra) {
  if (!State().recording) return AtRandom();
  std::ostringstream bytes;  // each parameter as a list
  const std::vector<size_t>& sizes = State().kernels[Number(kernel)];
  for (size_t i = 0; i < sizes.size(); ++i) {
    const auto* data = static_cast<const unsigned char*>(params[i]);
    const std::vector<int> values(data, data + sizes[i]);
    bytes << (i ? "," : "") << List(values.data(), values.size());
  }
  std::ostringstream cluster;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const auto& [x, y, z] = config->attrs[i].value.clusterDim;
    cluster << x << "," << y << "," << z;
  }
  return Answer("cuLaunchKernelEx", {{"kernel", Number(kernel)},
                                     {"grid", List(&config->gridDimX, 3)},
                                     {"block", List(&config->blockDimX, 3)},
                                     {"smem_bytes", config->sharedMemBytes},
                                     {"stream", Number(config->hStream)},
                                     {"cluster", "[" + cluster.str() + "]"},
                                     {"params", "[" + bytes.str() + "]"},
                                     {"extra", Number(extra)}});
}

}  // extern "C"
