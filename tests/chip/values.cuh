// What the elements of random products are: of operands, of sums, of results.
//
// Operands are integers that a hash gives for (line, k): the line of A is a row, of B a column,
// plus a shift for each index of the batch, modulo a prime. So D has few distinct sums however
// large it is, each is an ordinary float32 product of `k` terms that no order of summation rounds,
// and every element of D has one right value.

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define ON_DEVICE __device__
#else
#define ON_DEVICE
#endif

// `structs.py` has the same numbers.
enum Role { kFactor, kOperand, kTable, kScale, kWorkspace, kSums, kResult };
enum Dtype { kBf16, kF16, kE4m3, kE5m2, kInt8, kF32, kBool, kInt32, kInt4 };
// kWritten: of numbers that may be rounded in several ways only this is checked.
enum Kind { kMatrix, kRowSum, kRowMax, kColumnSum, kMax, kTopValues, kTopIndices, kWritten };
// clang-format off
enum Op {
  kConstant, kNeg, kAbs, kSign, kSquare, kFloor, kCeil, kRound, kConvert, kAdd, kSub, kMul,
  kMaximum, kMinimum, kEq, kNe, kLt, kLe, kGt, kGe, kAnd, kOr, kXor, kNot, kIsFinite, kSelect
};
// clang-format on
constexpr int kMaxValues = 48, kRun = 64;

struct Node {
  int32_t op, args[3], dtype;
  float value;
};

// An array of any problem, whose axes are three of the batch, rows and columns.
struct Array {
  int64_t address, extent[5], stride[5];  // stride in elements
  const uint32_t* table;
  const uint8_t *alive_batch, *alive_rows, *alive_columns;
  int32_t shift_rows[3], shift_columns[3];
  int32_t problem, role, dtype, which;  // which factor, operand or value of the graph
  // Of a result its kind and the block that an element of it reduces; of an operand whether it
  // varies along rows and columns; of a workspace 1: holds noise, 2: zeros; of scales 1: each is of
  // a line of B, not of a block of lines.
  int32_t kind, block_m, block_n;
  int32_t packed;  // the axis along which an element is a byte of two, the first in its low bits
  int32_t parts;   // of a factor how many of each number lie along K, in runs of `kRun`; 0: it is whole
};

struct Problem {  // tables that it does not need are null
  const Node* nodes;
  float* sums;
  const int32_t* row_matrix;
  const int64_t* spans;
  const int32_t* indices;
  int32_t m, n, k, outer_middle, inner;  // extents; those of a nested batch
  int32_t lines[2];                      // of A, of B
  int32_t a, b, first_operand;           // among the arrays
  int32_t accumulators, operands, num_nodes;
  int32_t instances;  // sets of sums: one, of grouped K one for each group
  int32_t direct;     // whether there is a sum for each element, not for each pair of lines
  int32_t source_rows, gathered;   // 0: none, 1: A, 2: B
  int32_t grouped;                 // 0: none, 1: M, 2: K
  int32_t index_of_a, index_of_b;  // of a matrix in a stack, else -1
  int32_t widths[2];               // A and B are integers of these magnitudes at most
  uint32_t seed;
  int32_t scale_k;               // elements of K that share a scale; 0: there are none
  int32_t scales[2], blocks[2];  // of blocks: the arrays of scales, and the lines that share one
};

ON_DEVICE static uint32_t Hash(uint32_t seed, uint32_t x, uint32_t y) {
  uint32_t h = seed ^ (x * 0x9E3779B1u) ^ (y * 0x85EBCA77u + 0x165667B1u);
  h = (h ^ (h >> 15)) * 0x2C1B3C6Du;
  h = (h ^ (h >> 12)) * 0x297A2D39u;
  return h ^ (h >> 15);
}

ON_DEVICE static float Integer(uint32_t seed, int64_t x, int64_t y, int width) {
  const uint64_t values = 2 * width + 1;
  return static_cast<float>(static_cast<int>(Hash(seed, x, y) * values >> 32) - width);
}

// Returns x % m for x >= 0; division of 64 bits is slow on a GPU.
ON_DEVICE static int64_t Modulo(int64_t x, int32_t m) {
  return x >> 32 ? x % m : static_cast<uint32_t>(x) % static_cast<uint32_t>(m);
}

ON_DEVICE static float FactorValue(const Problem& p, int which, int64_t line, int64_t k) {
  return Integer(p.seed + 7919 * which, line, k, p.widths[which > 0]);
}

ON_DEVICE static float ScaleValue(const Problem& p, int which, int64_t l, int64_t k, int64_t at) {
  return exp2f(Integer(p.seed + 31 + which, at * 131 + l, k, 2));
}

ON_DEVICE static int64_t Shifted(int64_t line, const int32_t* shift, const int64_t* batch) {
  return line + shift[0] * batch[0] + shift[1] * batch[1] + shift[2] * batch[2];
}

template <typename To, typename From>
ON_DEVICE static To Reinterpreted(From from) {
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

struct Format {             // of a small float
  int digits, least, bits;  // digits with the hidden one; exponents from 2^least on
  float largest;
  bool infinite;  // or else only NaN has all ones
};

ON_DEVICE static Format FormatOf(int dtype) {
  return dtype == kBf16   ? Format{8, -133, 16, 3.3895314e38f, true}
         : dtype == kF16  ? Format{11, -24, 16, 65504, true}
         : dtype == kE4m3 ? Format{4, -9, 8, 448, false}
                          : Format{3, -16, 8, 57344, true};
}

ON_DEVICE static int Bytes(int dtype) {
  return dtype <= kF16 ? 2 : dtype == kF32 || dtype == kInt32 ? 4 : 1;
}

// Returns the number that a dtype holds, to nearest even; overflow as in ml_dtypes.
ON_DEVICE static float Quantized(float x, int dtype) {
  if (dtype == kInt8) return x != x ? 0 : fminf(127, fmaxf(-128, truncf(x)));
  if (dtype > kE5m2 || x == 0 || !isfinite(x)) return x;
  if (dtype == kBf16) {  // the upper half of a float32
    const uint32_t word = Reinterpreted<uint32_t>(x);
    return Reinterpreted<float>((word + 0x7FFF + (word >> 16 & 1)) & 0xFFFF0000u);
  }
  const Format format = FormatOf(dtype);
  int exponent = 0;
  frexpf(x, &exponent);
  const int lowest =
      exponent - format.digits > format.least ? exponent - format.digits : format.least;
  const float rounded = ldexpf(rintf(ldexpf(x, -lowest)), lowest);
  if (fabsf(rounded) <= format.largest) return rounded;
  return format.infinite ? copysignf(INFINITY, x) : NAN;
}

// Returns the bits of a number that the dtype holds.
ON_DEVICE static uint32_t Encoded(float x, int dtype) {
  if (dtype == kF32) return Reinterpreted<uint32_t>(x);
  if (dtype == kBf16) return Reinterpreted<uint32_t>(x) >> 16;
  if (dtype == kBool) return x > 0;
  if (dtype == kInt32) return static_cast<uint32_t>(static_cast<int>(x));
  if (dtype == kInt8 || dtype == kInt4) return static_cast<uint8_t>(static_cast<int>(x));
  const auto [digits, least, bits, largest, infinite] = FormatOf(dtype);
  const uint32_t sign = signbit(x) ? 1u << (bits - 1) : 0;
  const uint32_t all = (1u << (bits - 1)) - 1;
  if (x != x) return sign | all;
  if (x == 0) return sign;
  if (isinf(x)) return sign | (all >> (digits - 1) << (digits - 1));
  int exponent = 0;
  const float fraction = frexpf(fabsf(x), &exponent);
  const int shift = exponent - digits - least;  // of the hidden digit above the least one
  if (shift < 0) return sign | static_cast<uint32_t>(ldexpf(fabsf(x), -least));
  return sign | static_cast<uint32_t>((shift << (digits - 1)) + ldexpf(fraction, digits));
}

ON_DEVICE static float Decoded(uint32_t word, int dtype) {
  if (dtype == kF32) return Reinterpreted<float>(word);
  if (dtype == kBf16) return Reinterpreted<float>(word << 16);
  if (dtype == kBool) return word;
  if (dtype == kInt32) return static_cast<int32_t>(word);
  if (dtype == kInt8) return static_cast<int8_t>(word);
  const auto [digits, least, bits, largest, infinite] = FormatOf(dtype);
  const uint32_t all = (1u << (bits - 1)) - 1, magnitude = word & all;
  const int shift = magnitude >> (digits - 1);
  const uint32_t fraction = magnitude & ((1u << (digits - 1)) - 1);
  float x = 0;
  if (infinite ? shift == static_cast<int>(all >> (digits - 1)) : magnitude == all) {
    x = fraction || !infinite ? NAN : INFINITY;
  } else if (shift == 0) {
    x = ldexpf(fraction, least);
  } else {
    x = ldexpf(fraction + (1u << (digits - 1)), least + shift - 1);
  }
  return word >> (bits - 1) & 1 ? -x : x;
}

ON_DEVICE static uint32_t Load(int64_t address, int dtype) {
  switch (Bytes(dtype)) {
    case 1:
      return *reinterpret_cast<const uint8_t*>(address);
    case 2:
      return *reinterpret_cast<const uint16_t*>(address);
    default:
      return *reinterpret_cast<const uint32_t*>(address);
  }
}

ON_DEVICE static void Store(int64_t address, int dtype, uint32_t word) {
  switch (Bytes(dtype)) {
    case 1:
      *reinterpret_cast<uint8_t*>(address) = word;
      break;
    case 2:
      *reinterpret_cast<uint16_t*>(address) = word;
      break;
    default:
      *reinterpret_cast<uint32_t*>(address) = word;
  }
}

ON_DEVICE static uint32_t Poison(int dtype) { return 0xFFFFFFFFu >> (32 - 8 * Bytes(dtype)); }

ON_DEVICE static void Coordinates(const Array& array, int64_t element, int64_t* at) {
  for (int axis = 4; axis > 0; --axis) {
    const int64_t extent = array.extent[axis];
    if (extent == 1) {
      at[axis] = 0;
    } else if (element >> 32 == 0) {
      at[axis] = static_cast<uint32_t>(element) % static_cast<uint32_t>(extent);
      element = static_cast<uint32_t>(element) / static_cast<uint32_t>(extent);
    } else {
      at[axis] = element % extent;
      element /= extent;
    }
  }
  at[0] = element;
}

ON_DEVICE static bool Alive(const Array& array, const int64_t* at) {
  const auto in = [](const uint8_t* table, int64_t i) { return table == nullptr || table[i]; };
  return in(array.alive_batch, at[2]) && in(array.alive_rows, at[3]) &&
         in(array.alive_columns, at[4]);
}

// Returns what a factor of parts holds at a place along K.
ON_DEVICE static float Part(const Problem& p, const Array& array, int64_t line, int64_t place) {
  const int64_t k = place / (kRun * array.parts) * kRun + place % kRun;
  float rest = k < p.k ? FactorValue(p, array.which, line, k) : 0;
  for (int part = place / kRun % array.parts; part > 0; --part)
    rest -= Quantized(rest, array.dtype);
  return Quantized(rest, array.dtype);
}

// Returns what an array holds at a row and a column, as bits.
ON_DEVICE static uint32_t GivenAt(const Array& array, const Problem& p, int64_t row,
                                  int64_t column) {
  if (array.role == kOperand)
    return Encoded(Integer(p.seed + 101 + array.which, row, column, 3), array.dtype);
  const bool of_a = array.which == 0;
  const int64_t line = of_a ? Modulo(row, p.lines[0]) : Modulo(column, p.lines[1]);
  const int64_t k = of_a ? column : row;
  if (array.parts) return Encoded(Part(p, array, line, k), array.dtype);
  return Encoded(FactorValue(p, array.which, line, k), array.dtype);
}

// Returns what an input holds at `at`, as bits.
ON_DEVICE static uint32_t Given(const Array& array, const Problem& p, const int64_t* at,
                                int64_t element) {
  if (array.role == kTable) return array.table[element];
  const int twice = array.packed == 3, beside = array.packed == 4;
  const int64_t row = Shifted(at[3] << twice, array.shift_rows, at);
  const int64_t column = Shifted(at[4] << beside, array.shift_columns, at);
  if (array.role == kScale) {
    const float x = array.kind ? ScaleValue(p, array.which, 0, row, Modulo(column, p.lines[1]))
                               : ScaleValue(p, array.which, at[2], at[3], at[4]);
    return Encoded(x, kF32);
  }
  const uint32_t word = GivenAt(array, p, row, column);
  if (!array.packed) return word;
  return (word & 15) | (GivenAt(array, p, row + twice, column + beside) & 15) << 4;
}

// Returns the sum at [set, row, column] of accumulator `which`: of two lines, or of an element.
ON_DEVICE static float Sum(const Array* arrays, const Problem& p, int which, int64_t set,
                           int64_t row, int64_t column) {
  int64_t l[2] = {set, set}, a = row, b = column;
  if (p.direct) {
    if (p.grouped == 1) l[0] = 0, l[1] = p.row_matrix[row];
    if (p.grouped == 2) l[0] = l[1] = 0;
    if (l[1] < 0) return 0;
    const int64_t batch_a[3] = {0, 0, p.index_of_a < 0 ? l[0] : p.index_of_a};
    const int64_t batch_b[3] = {0, 0, p.index_of_b < 0 ? l[1] : p.index_of_b};
    a = Shifted(row, arrays[p.a].shift_rows, batch_a);
    b = Shifted(column, arrays[p.b].shift_columns, batch_b);
    for (int i = 0; i < 2; ++i) l[i] = arrays[p.scales[i]].shift_rows[0] ? l[i] : 0;
  }
  const int64_t end = p.grouped == 2 ? p.spans[2 * set + 1] : p.k;
  const int gathered = p.grouped == 2 ? p.gathered : 0;
  float sum = 0;
  for (int64_t k = p.grouped == 2 ? p.spans[2 * set] : 0; k < end;) {
    const int64_t first = k, next = p.scale_k ? (k / p.scale_k + 1) * p.scale_k : end;
    float part = 0;
    for (; k < next && k < end; ++k) {
      const int64_t picked = gathered ? p.indices[k] : k;
      if (gathered && (picked < 0 || picked >= p.source_rows)) continue;
      part += FactorValue(p, 0, a, gathered == 1 ? picked : k) *
              FactorValue(p, 1 + which, b, gathered == 2 ? picked : k);
    }
    if (p.direct) {
      part *= ScaleValue(p, 0, l[0], first / p.scale_k, row / p.blocks[0]) *
              ScaleValue(p, 1, l[1], first / p.scale_k, column / p.blocks[1]);
    } else if (p.scale_k) {
      part *= ScaleValue(p, which, 0, first / p.scale_k, column);
    }
    sum += part;
  }
  return sum;
}

ON_DEVICE static float Accumulator(const Array* arrays, const Problem& p, int which,
                                   const int64_t* batch, int64_t i, int64_t j) {
  int64_t a[3] = {batch[0], batch[1], batch[2]}, b[3] = {batch[0], batch[1], batch[2]}, row = i;
  int64_t set = 0;
  if (p.direct) return p.sums[((which * p.instances + batch[2]) * p.m + i) * p.n + j];
  if (p.grouped) a[2] = 0;
  if (p.grouped == 1) b[2] = p.row_matrix[i];
  if (p.grouped == 2) b[2] = 0, set = batch[2];
  if (p.grouped == 1 && p.gathered) {
    row = p.indices[i];
    if (row < 0 || row >= p.source_rows) return 0;
  }
  if (p.index_of_a >= 0) a[2] = p.index_of_a;
  if (p.index_of_b >= 0) b[2] = p.index_of_b;
  const int64_t line_a = Modulo(Shifted(row, arrays[p.a].shift_rows, a), p.lines[0]);
  const int64_t line_b = Modulo(Shifted(j, arrays[p.b].shift_columns, b), p.lines[1]);
  return p.sums[((which * p.instances + set) * p.lines[0] + line_a) * p.lines[1] + line_b];
}

ON_DEVICE static float Applied(const Node& node, float x, float y, float z) {
  // clang-format off
  switch (node.op) {
    case kConstant: return node.value;
    case kNeg: return -x;
    case kAbs: return fabsf(x);
    case kSign: return (x > 0) - (x < 0);
    case kSquare: return x * x;
    case kFloor: return floorf(x);
    case kCeil: return ceilf(x);
    case kRound: return rintf(x);
    case kConvert: return Quantized(x, node.dtype);
    case kAdd: return x + y;
    case kSub: return x - y;
    case kMul: return x * y;
    case kMaximum: return fmaxf(x, y);
    case kMinimum: return fminf(x, y);
    case kEq: return x == y;
    case kNe: return x != y;
    case kLt: return x < y;
    case kLe: return x <= y;
    case kGt: return x > y;
    case kGe: return x >= y;
    case kAnd: return x != 0 && y != 0;
    case kOr: return x != 0 || y != 0;
    case kXor: return (x != 0) != (y != 0);
    case kNot: return x == 0;
    case kIsFinite: return isfinite(x) != 0;
    default: return x != 0 ? y : z;
  }
  // clang-format on
}

// Returns one value of the epilogue's graph at an element of D.
ON_DEVICE static float ValueAt(const Array* arrays, const Problem& p, int value,
                               const int64_t* batch, int64_t i, int64_t j) {
  float values[kMaxValues];
  int count = 0;
  for (; count < p.accumulators; ++count) {
    values[count] = Accumulator(arrays, p, count, batch, i, j);
  }
  if (value < count) return values[value];
  int64_t of_group[3] = {batch[0], batch[1], batch[2]};
  const int64_t alone[3] = {0, 0, 0};
  if (p.grouped == 1) of_group[2] = p.row_matrix[i];
  for (int operand = 0; operand < p.operands; ++operand, ++count) {
    const Array& array = arrays[p.first_operand + operand];
    const bool by_rows = array.block_m;  // a column or matrix
    const int64_t* at = p.grouped == 1 && by_rows ? alone : of_group;
    const int64_t row = Shifted(by_rows ? i : 0, array.shift_rows, at);
    const int64_t column = Shifted(array.block_n ? j : 0, array.shift_columns, at);
    const float x = Integer(p.seed + 101 + array.which, row, column, 3);
    values[count] = array.dtype == kBool ? x > 0 : x;
  }
  for (int node = 0; node < p.num_nodes && count <= value; ++node, ++count) {
    const Node& n = p.nodes[node];
    values[count] = Applied(n, values[n.args[0]], values[n.args[1]], values[n.args[2]]);
  }
  return values[value];
}
