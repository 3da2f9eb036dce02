// Fills the memory of random products, computes what kernels should have written, and compares.
//
// Nothing here is shared with the kernels under test. One source makes two libraries: nvcc's works
// on a GPU; a C++ compiler's, where one thread plays all, on the memory of the host. `values.cuh`
// says what the elements are.

#include "values.cuh"

#include <stdlib.h>

#ifdef __CUDACC__
#define KERNEL __global__
#define COUNT(place, number) atomicAdd(place, number)
#define LEAST(place, number) atomicMin(place, number)
#else
#define KERNEL static
#define COUNT(place, number) (*(place) += (number))
#define LEAST(place, number) (*(place) = *(place) < (number) ? *(place) : (number))
static struct {
  unsigned x;
} blockIdx, threadIdx, gridDim, blockDim = {1};
#endif

typedef unsigned long long Word;

// What is done to all arrays, in order; `structs.py` has the same numbers.
enum Phase { kFill, kReference, kCheck };

struct Chunk {
  int64_t begin, end;
  int32_t array, unused;
};

struct Report {
  Word wrong;  // elements
  Word first;  // array << 48 | element
};

// Whether `got` is right at `at` of a result; what lies in a reduced block is computed anew.
ON_DEVICE static bool IsRight(const Array* arrays, const Array& array, const Problem& p,
                              const int64_t* at, uint32_t word) {
  const float got = Decoded(word, array.dtype);
  int64_t batch[3] = {at[0], at[1], at[2]}, i = at[3], j = at[4];
  if (array.kind == kWritten) return p.grouped == 1 || word != Poison(array.dtype);
  const auto value = [&](int64_t row, int64_t column) {
    return ValueAt(arrays, p, array.which, batch, row, column);
  };
  if (array.kind == kMatrix) {
    if (p.grouped == 1 && p.row_matrix[i] < 0) return got == 0;
    const float right = Quantized(value(i, j), array.dtype);
    return got == right || (got != got && right != right);
  }
  batch[2] = at[2] % p.inner;
  batch[1] = at[2] / p.inner % p.outer_middle;
  batch[0] = at[2] / p.inner / p.outer_middle;
  if (array.kind == kTopValues || array.kind == kTopIndices) {
    if (p.grouped == 1 && p.row_matrix[i] < 0) return true;
    const bool indices = array.kind == kTopIndices;
    const int64_t column = static_cast<int32_t>(word);
    if (indices && (column < 0 || column >= p.n)) return false;
    const float of_rank = indices ? value(i, column) : got;
    int64_t before = 0, equal = 0;
    for (int64_t other = 0; other < p.n; ++other) {
      const float x = value(i, other);
      before += x > of_rank || (indices && x == of_rank && other < column);
      equal += x == of_rank;
    }
    return indices ? before == j : before <= j && j < before + equal;
  }
  const bool by_row = array.kind == kRowSum || array.kind == kRowMax;
  if (by_row) {  // stored (L, tiles along N, M)
    i = at[4];
    j = at[3];
    if (p.grouped == 1 && p.row_matrix[i] < 0) return true;
  }
  const int64_t last_i = (i + 1) * array.block_m, last_j = (j + 1) * array.block_n;
  const bool adds = array.kind == kRowSum || array.kind == kColumnSum;
  float found = adds ? 0 : -INFINITY;
  for (int64_t row = i * array.block_m; row < last_i && row < p.m; ++row) {
    for (int64_t column = j * array.block_n; column < last_j && column < p.n; ++column) {
      const float x = value(row, column);
      found = adds ? found + x : fmaxf(found, x);
    }
  }
  return got == found;
}

ON_DEVICE static void VisitElement(int phase, const Array* arrays, const Array& array,
                                   const Problem& p, Report* report, int number, int64_t element) {
  int64_t at[5];
  Coordinates(array, element, at);
  int64_t address = array.address;
  int64_t offset = 0;
  for (int axis = 0; axis < 5; ++axis) offset += at[axis] * array.stride[axis];
  address += offset * Bytes(array.dtype);
  if (phase == kFill) {
    if (array.role == kWorkspace) {
      if (array.kind) Store(address, array.dtype, array.kind == 1 ? Hash(p.seed, element, 5) : 0);
    } else if (Alive(array, at)) {
      Store(address, array.dtype, Given(array, p, at, element));
    }
  } else if (phase == kReference) {  // (accumulator, set, row, column)
    Store(address, kF32, Encoded(Sum(arrays, p, at[1], at[2], at[3], at[4]), kF32));
  } else {
    const uint32_t word = Load(address, array.dtype);
    bool right = true;
    if (array.role == kResult) {
      right = IsRight(arrays, array, p, at, word);
    } else if (array.role != kWorkspace) {
      right = word == (Alive(array, at) ? Given(array, p, at, element) : Poison(array.dtype));
    }
    if (!right) {
      COUNT(&report[array.problem].wrong, Word{1});
      LEAST(&report[array.problem].first, Word(number) << 48 | Word(element));
    }
    Store(address, array.dtype, Poison(array.dtype));
  }
}

KERNEL void VisitChunk(int phase, const Array* arrays, const Problem* problems, const Chunk* chunks,
                       Report* reports) {
  const Chunk chunk = chunks[blockIdx.x];
  const Array& array = arrays[chunk.array];
  const Problem& p = problems[array.problem];
  for (int64_t e = chunk.begin + threadIdx.x; e < chunk.end; e += blockDim.x) {
    VisitElement(phase, arrays, array, p, reports, chunk.array, e);
  }
}

// Counts the bytes that are not poison, remembers the first, and poisons them again.
KERNEL void SweepWords(uint32_t* memory, int64_t words, Report* report) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < words; i += step) {
    const uint32_t word = memory[i];
    if (word == 0xFFFFFFFFu) continue;
    for (int byte = 0; byte < 4; ++byte) {
      if ((word >> (8 * byte) & 0xFF) == 0xFF) continue;
      COUNT(&report->wrong, Word{1});
      LEAST(&report->first, Word(4 * i + byte));
    }
    memory[i] = 0xFFFFFFFFu;
  }
}

// Runs a kernel on so many blocks.
template <typename... Arguments, typename... Given>
static void Launch(void (*kernel)(Arguments...), int64_t blocks, Given... given) {
#ifdef __CUDACC__
  if (blocks > 0) kernel<<<blocks, 256>>>(given...);
#else
  gridDim.x = blocks;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) kernel(given...);
#endif
}

#ifndef __CUDACC__
enum { cudaSuccess, cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
static int cudaMalloc(void** memory, size_t bytes) {
  return (*memory = aligned_alloc(256, bytes)) == nullptr;
}
static void cudaMemcpy(void* to, const void* from, size_t bytes, int) { memcpy(to, from, bytes); }
static void cudaMemsetAsync(void* to, int byte, size_t bytes) { memset(to, byte, bytes); }
static int cudaDeviceSynchronize() { return cudaSuccess; }
static const char* cudaGetErrorName(int) { return "no error"; }
typedef void* cudaStream_t;
static void cudaStreamCreate(cudaStream_t* stream) { *stream = nullptr; }
#endif

extern "C" {

int64_t chip_sizes(int which) {
  const int64_t sizes[] = {sizeof(Node), sizeof(Array), sizeof(Problem), sizeof(Chunk)};
  return sizes[which];
}

void* chip_allocate(int64_t bytes) {
  void* memory = nullptr;
  return cudaMalloc(&memory, bytes) == cudaSuccess ? memory : nullptr;
}

void chip_upload(void* to, const void* from, int64_t bytes) {
  cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice);
}

void chip_download(void* to, const void* from, int64_t bytes) {
  cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost);
}

void chip_set(void* to, int byte, int64_t bytes) { cudaMemsetAsync(to, byte, bytes); }

void chip_visit(int phase, const Array* arrays, const Problem* problems, const Chunk* chunks,
                int64_t count, Report* reports) {
  Launch(VisitChunk, count, phase, arrays, problems, chunks, reports);
}

void chip_sweep(uint32_t* memory, int64_t bytes, Report* report) {
  Launch(SweepWords, 2048, memory, bytes / 4, report);
}

// Returns a stream that waits for what all others were given before by the functions here, and on
// which these wait: the legacy default stream, on which they are, does both.
void* chip_stream() {
  cudaStream_t stream = nullptr;
  cudaStreamCreate(&stream);
  return stream;
}

// Waits; returns an error's name, or null.
const char* chip_synchronize() {
  const auto error = cudaDeviceSynchronize();
  return error == cudaSuccess ? nullptr : cudaGetErrorName(error);
}

}  // extern "C"
