#include "plan.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

namespace jax_hopper_gemm {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kVersion = 2;
constexpr int64_t kMaxGridX = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxGridYZ = 65535;
constexpr int64_t kMaxClusterSize = 8;  // more is not portable and asks for an attribute
constexpr int64_t kMaxThreads = 1024;
constexpr int64_t kMaxSmemBytes = 227 * 1024;
constexpr int64_t kMaxBox = 256;
constexpr int64_t kMaxInt64 = std::numeric_limits<int64_t>::max();
constexpr int64_t kMaxBufferBytes = int64_t{1} << 48;  // more than any GPU has
constexpr int64_t kSpanExtent = int64_t{1} << 30;      // as in gemm/group_search.py
constexpr int64_t kWrapBytes = int64_t{1} << 34;       // as in gemm/grid.py

// Hands out words in turn. The first that is missing or out of range is remembered; from there on
// every word reads as the lowest value allowed.
class Reader {
 public:
  explicit Reader(ffi::Span<const int64_t> words) : words_(words) {}

  int64_t Next(const char* field, int64_t low, int64_t high) {
    if (!error_.empty()) return low;
    if (position_ == words_.size()) {
      error_ = "it ends after " + std::to_string(position_) + " words, before " + field;
      return low;
    }
    const int64_t word = words_[position_++];
    if (word < low || word > high) {
      error_ = "word " + std::to_string(position_ - 1) + ", " + field + ", is " +
               std::to_string(word) + ", not " + std::to_string(low) + " to " +
               std::to_string(high);
      return low;
    }
    return word;
  }

  int NextBuffer() {
    const int buffer = static_cast<int>(Next("buffer", 0, kMaxBuffers - 1));
    if (reach_.size() <= static_cast<size_t>(buffer)) reach_.resize(buffer + 1);
    return buffer;
  }

  void Reach(int buffer, int64_t bytes) { reach_[buffer] = std::max(reach_[buffer], bytes); }

  void Fail(const std::string& error) {
    if (error_.empty()) error_ = error;
  }

  std::vector<int64_t> TakeReach() { return std::move(reach_); }
  size_t words_left() const { return words_.size() - position_; }
  const std::string& error() const { return error_; }

 private:
  ffi::Span<const int64_t> words_;
  size_t position_ = 0;
  std::vector<int64_t> reach_;
  std::string error_;
};

int64_t ElementBytes(CUtensorMapDataType dtype) {
  switch (dtype) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8:
      return 1;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
      return 2;
    case CU_TENSOR_MAP_DATA_TYPE_UINT64:
    case CU_TENSOR_MAP_DATA_TYPE_INT64:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT64:
      return 8;
    default:
      return 4;
  }
}

// Whether it is a map over rows of which a copy can be told where to stop: `span_map` of
// jax_hopper_gemm/launch/params.py. Its addresses wrap around, back into the rows.
bool IsSpanMap(const TensorMapPlan& map) {
  return map.rank == 4 && map.dims[1] == kSpanExtent && map.dims[3] == kSpanExtent + 1 &&
         map.strides[1] == map.strides[0] && map.strides[2] == kWrapBytes - map.strides[0];
}

// Returns how many bytes from its buffer's start a map reaches; kMaxInt64 where it is no number.
int64_t ReachOf(const TensorMapPlan& map) {
  const bool spans = IsSpanMap(map);
  int64_t reach = map.offset + map.dims[0] * ElementBytes(map.dtype);
  for (int i = 1; i < (spans ? 2 : map.rank); ++i) {
    // Of spans there are as many rows as ends of one that is not empty.
    const int64_t last = spans ? std::max<int64_t>(map.dims[2], 2) - 2 : map.dims[i] - 1;
    int64_t bytes = 0;
    if (__builtin_mul_overflow(last, map.strides[i - 1], &bytes) ||
        __builtin_add_overflow(reach, bytes, &reach)) {
      return kMaxInt64;
    }
  }
  return reach;
}

TensorMapPlan DecodeTensorMap(Reader& reader) {
  TensorMapPlan map = {};
  map.buffer = reader.NextBuffer();
  map.offset = reader.Next("tensor map offset", 0, kMaxBufferBytes);
  map.dtype = static_cast<CUtensorMapDataType>(
      reader.Next("tensor map dtype", 0, CU_TENSOR_MAP_DATA_TYPE_TFLOAT32_FTZ));
  map.swizzle = static_cast<CUtensorMapSwizzle>(
      reader.Next("tensor map swizzle", 0, CU_TENSOR_MAP_SWIZZLE_128B));
  map.rank = static_cast<int>(reader.Next("tensor map rank", 1, kMaxRank));
  for (int i = 0; i < map.rank; ++i) {
    map.dims[i] = reader.Next("tensor map extent", 1, int64_t{1} << 32);
  }
  for (int i = 0; i + 1 < map.rank; ++i) {
    map.strides[i] = reader.Next("tensor map stride", 0, kMaxInt64);
  }
  for (int i = 0; i < map.rank; ++i) map.box[i] = reader.Next("tensor map box", 1, kMaxBox);
  const int64_t reach = ReachOf(map);
  if (reach > kMaxBufferBytes) {
    reader.Fail("a tensor map reaches " + std::to_string(reach) + " bytes into buffer " +
                std::to_string(map.buffer) + ", more than any has");
  }
  reader.Reach(map.buffer, reach);
  return map;
}

Param DecodeParam(Reader& reader, std::vector<TensorMapPlan>& tensor_maps) {
  const auto kind = static_cast<Param::Kind>(reader.Next("parameter kind", 0, 2));
  if (kind == Param::Kind::kTensorMap) {
    tensor_maps.push_back(DecodeTensorMap(reader));
    return {kind, static_cast<int32_t>(tensor_maps.size() - 1)};
  }
  if (kind == Param::Kind::kPointer) return {kind, reader.NextBuffer()};
  return {kind,
          static_cast<int32_t>(reader.Next("int32 parameter", std::numeric_limits<int32_t>::min(),
                                           std::numeric_limits<int32_t>::max()))};
}

}  // namespace

ffi::ErrorOr<Plan> DecodePlan(ffi::Span<const int64_t> words) {
  Reader reader(words);
  Plan plan = {};
  const int64_t version = reader.Next("version", 1, kMaxInt64);
  if (reader.error().empty() && version != kVersion) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(
        "the launch plan has version " + std::to_string(version) +
        ", and this jax_hopper_gemm reads version " + std::to_string(kVersion) +
        ": another one made the program. Trace and export it again with this one, or run it with "
        "that one."));
  }
  plan.grid[0] = reader.Next("grid x", 1, kMaxGridX);
  plan.grid[1] = reader.Next("grid y", 1, kMaxGridYZ);
  plan.grid[2] = reader.Next("grid z", 1, kMaxGridYZ);
  for (unsigned& extent : plan.cluster) extent = reader.Next("cluster", 1, kMaxClusterSize);
  if (plan.cluster[0] * plan.cluster[1] * plan.cluster[2] > kMaxClusterSize) {
    reader.Fail("the cluster has more than " + std::to_string(kMaxClusterSize) + " CTAs");
  }
  for (int i = 0; i < 3; ++i) {
    if (plan.grid[i] % plan.cluster[i] != 0) reader.Fail("the cluster does not divide the grid");
  }
  plan.threads = reader.Next("threads", 1, kMaxThreads);
  plan.smem_bytes = reader.Next("shared memory bytes", 0, kMaxSmemBytes);

  plan.cleared.resize(reader.Next("number of cleared workspaces", 0, kMaxCleared));
  for (Cleared& cleared : plan.cleared) {
    cleared.buffer = reader.NextBuffer();
    const int64_t bytes = reader.Next("workspace bytes", 0, kMaxBufferBytes);
    if (bytes % 4 != 0) reader.Fail("a cleared workspace is not a multiple of 4 bytes");
    cleared.words = bytes / 4;
    reader.Reach(cleared.buffer, bytes);
  }
  plan.params.resize(reader.Next("number of parameters", 0, kMaxParams));
  for (Param& param : plan.params) param = DecodeParam(reader, plan.tensor_maps);
  if (plan.tensor_maps.size() > kMaxTensorMaps) {
    reader.Fail("it has more than " + std::to_string(kMaxTensorMaps) + " tensor maps");
  }
  if (reader.words_left() != 0) {
    reader.Fail(std::to_string(reader.words_left()) + " words follow its end");
  }
  if (!reader.error().empty()) {
    return ffi::Unexpected(
        ffi::Error::InvalidArgument("the launch plan is malformed: " + reader.error()));
  }
  plan.reach = reader.TakeReach();
  return plan;
}

}  // namespace jax_hopper_gemm
