// One call site of a program: a kernel and how to launch it. Immutable, but for a flag that only
// rises, so any number of threads, streams and devices run it at once.

#ifndef JAX_HOPPER_GEMM_FFI_LAUNCH_H_
#define JAX_HOPPER_GEMM_FFI_LAUNCH_H_

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "cuda.h"
#include "driver.h"
#include "plan.h"
#include "xla/ffi/api/ffi.h"

namespace jax_hopper_gemm {

class Launch {
 public:
  static xla::ffi::TypeId id;  // given by XLA when the type is registered

  // Checks that `kernel` takes the plan's parameters and encodes the tensor maps. `name` says in
  // errors what ran: the kernel and the extents.
  static xla::ffi::ErrorOr<std::unique_ptr<Launch>> Create(const Driver& driver,
                                                           std::string_view name, CUkernel kernel,
                                                           Plan plan);

  const std::string& name() const { return name_; }

  // Enqueues the launch on `stream`. Allocates nothing, takes no lock.
  xla::ffi::Error Run(CUstream stream, const xla::ffi::RemainingArgs& operands,
                      const xla::ffi::RemainingRets& results) const;

 private:
  Launch(const Driver& driver, std::string_view name, CUkernel kernel, Plan plan)
      : driver_(driver), name_(name), kernel_(kernel), plan_(std::move(plan)) {}

  xla::ffi::Error CheckParams() const;
  xla::ffi::Error EncodeTensorMaps();
  xla::ffi::Error CheckBuffers(const xla::ffi::RemainingArgs& operands,
                               const xla::ffi::RemainingRets& results) const;
  xla::ffi::Error Enqueue(CUstream stream, void** params) const;

  const Driver& driver_;
  const std::string name_;
  const CUkernel kernel_;
  const Plan plan_;
  std::vector<CUtensorMap> tensor_maps_;  // their addresses are placeholders
  // Whether the plan keeps within the buffers. XLA shows them only to the execute stage; at one
  // call site they always have the same sizes, so the first run checks them for all.
  mutable std::atomic<bool> fits_ = false;
};

}  // namespace jax_hopper_gemm

#endif  // JAX_HOPPER_GEMM_FFI_LAUNCH_H_
