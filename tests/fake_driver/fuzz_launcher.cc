// Fuzzes the launcher as XLA calls it: damaged plans, buffers of any size and address, kernels that
// are another's or none, a driver that fails, many threads. To be built with a sanitizer, and with
// the launcher's sources in the same file.
//
//   fuzz_launcher DRIVER PLANS SECONDS SEED THREADS
//
// PLANS is a file of encoded plans, one a line: how many buffers its call has, then the words.

#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "ffi_host.h"

extern "C" {
XLA_FFI_Error* JhgLaunchInstantiate(XLA_FFI_CallFrame*);
XLA_FFI_Error* JhgLaunchExecute(XLA_FFI_CallFrame*);
XLA_FFI_TypeId* JhgLaunchTypeId();
const XLA_FFI_TypeInfo* JhgLaunchTypeInfo();
void jhg_set_resolver(int (*)(const char*, const char*, uint64_t*, char*, size_t));
}

namespace {

struct Sample {
  int buffers;
  std::vector<int64_t> words;
};

std::vector<Sample> samples;
std::atomic<int64_t> loaded = 0, refused = 0, ran = 0;

// What a word may be instead.
constexpr int64_t kWords[] = {
    0,        1,        -1,       2,        3,        4,         5,         8,
    15,       16,       17,       63,       64,       65,        127,       128,
    255,      256,      257,      1024,     -16,      1 << 16,   1l << 30,  1l << 31,
    1l << 32, 1l << 34, 1l << 40, 1l << 48, 1l << 62, INT64_MAX, INT64_MIN, INT32_MIN};

void Fail(const char* what, const std::string& text) {
  std::fprintf(stderr, "FAILED: %s: %s\n", what, text.c_str());
  std::abort();
}

// Digest "N..." stands for the kernel of plan N, "x..." for none.
int Resolve(const char* digest, const char* spec, uint64_t* kernel, char* error, size_t capacity) {
  if (*digest == 'x') {  // a message without an end, a status without a message, a lie
    if (spec[0] != '\0') std::fill(error, error + capacity, 'e');
    return spec[0] % 2;
  }
  *kernel = 1 + std::strtoul(digest, nullptr, 10);
  return 0;
}

class Fuzzer {
 public:
  explicit Fuzzer(uint64_t seed) : random_(seed) {}

  void Try() {
    const size_t number = Below(samples.size());
    const Sample& sample = samples[number];
    std::vector<int64_t> words = sample.words;
    if (Below(4) != 0) Damage(words);
    const std::string digest = Below(16) == 0   ? "x" + std::to_string(Below(4))
                               : Below(16) == 0 ? std::to_string(Below(samples.size()))
                                                : std::to_string(number);
    const char* const specs[] = {"", "{\"tile_m\":64}", "a", "b"};
    char text[512] = "";
    void* state = nullptr;
    const int code = ffi_host_load(JhgLaunchInstantiate, digest.c_str(), specs[Below(4)], "fuzz",
                                   words.data(), words.size(), &state, text, sizeof(text));
    if ((code == 0) != (state != nullptr)) Fail("an error with a state, or neither", text);
    if (code != 0) {
      Named(text);
      ++refused;
      return;
    }
    ++loaded;
    // The buffers of a call always have the same sizes.
    std::vector<int64_t> bytes(Below(8) == 0 ? Below(sample.buffers + 3) : sample.buffers);
    for (int64_t& size : bytes) size = Below(16) == 0 ? Below(1 << 12) : int64_t{1} << 50;
    const int64_t operands = Below(bytes.size() + 1);
    std::vector<std::thread> users;
    for (uint64_t i = Below(8) == 0 ? 2 : 0; i > 0; --i) {
      users.emplace_back([=, seed = random_()] { Fuzzer(seed).Run(state, bytes, operands); });
    }
    for (uint64_t i = Below(4); i > 0; --i) Run(state, bytes, operands);
    for (std::thread& user : users) user.join();
    ffi_host_free(JhgLaunchTypeInfo(), state);
  }

 private:
  uint64_t Below(uint64_t bound) { return random_() % bound; }

  void Damage(std::vector<int64_t>& words) {
    for (uint64_t i = Below(3) + 1; i > 0; --i) {
      const size_t at = Below(words.size());
      const int64_t word = Below(8) == 0 ? random_() : kWords[Below(std::size(kWords))];
      const uint64_t how = Below(16);
      if (how < 10) {
        words[at] = word;
      } else if (how < 12) {
        words[at] += Below(2) * 2 - 1;
      } else if (how == 12) {
        words.resize(at + 1);
      } else if (how == 13) {
        words.insert(words.begin() + at, word);
      } else if (how == 14) {
        words.erase(words.begin() + at);
        if (words.empty()) words.push_back(0);
      } else {  // a part of another plan
        const std::vector<int64_t>& other = samples[Below(samples.size())].words;
        words.insert(words.begin() + at, other.begin() + Below(other.size()), other.end());
      }
    }
  }

  void Run(void* state, std::vector<int64_t> bytes, int64_t operands) {
    std::vector<void*> addresses(bytes.size());
    for (void*& address : addresses) {
      const uint64_t misaligned = Below(64) == 0 ? Below(16) : 0;
      address = reinterpret_cast<void*>(Below(1ul << 47) / 16 * 16 + misaligned);
    }
    char text[512] = "";
    if (ffi_host_run(JhgLaunchExecute, state, nullptr, operands, bytes.size() - operands,
                     addresses.data(), bytes.data(), text, sizeof(text)) != 0) {
      return Named(text);
    }
    ++ran;
  }

  void Named(const std::string& text) {
    const std::string start = "jax_hopper_gemm: fuzz: ";
    if (text.size() <= start.size() || text.compare(0, start.size(), start) != 0) {
      Fail("an error that does not name its call", text);
    }
  }

  std::mt19937_64 random_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6) return 2;
  setenv("JAX_HOPPER_GEMM_LIBCUDA", argv[1], 1);
  void* driver = dlopen(argv[1], RTLD_NOW);
  if (driver == nullptr) Fail("no driver", dlerror());
  const auto add_kernel =
      reinterpret_cast<void (*)(uint64_t, const size_t*, size_t)>(dlsym(driver, "fake_add_kernel"));
  const auto fail_at_random =
      reinterpret_cast<void (*)(uint32_t)>(dlsym(driver, "fake_fail_at_random"));
  std::ifstream file(argv[2]);
  for (std::string line; std::getline(file, line);) {
    std::istringstream numbers(line);
    Sample sample = {};
    int count = 0;
    numbers >> sample.buffers >> count;
    std::vector<size_t> sizes(count);
    for (size_t& size : sizes) numbers >> size;
    for (int64_t word; numbers >> word;) sample.words.push_back(word);
    samples.push_back(sample);
    add_kernel(samples.size(), sizes.data(), sizes.size());
  }
  jhg_set_resolver(Resolve);
  JhgLaunchTypeId()->type_id = 1;  // as XLA does when it registers the type
  fail_at_random(40);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(atof(argv[3]));
  std::vector<std::thread> threads;
  for (int i = 0; i < std::atoi(argv[5]); ++i) {
    threads.emplace_back([seed = std::strtoull(argv[4], nullptr, 10) * 1000 + i, end] {
      Fuzzer fuzzer(seed);
      do {
        fuzzer.Try();
      } while (std::chrono::steady_clock::now() < end);
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::printf("%ld plans loaded, %ld refused, %ld runs\n", loaded.load(), refused.load(),
              ran.load());
}
