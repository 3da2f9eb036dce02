// The C entry points that jax_hopper_gemm/launch/ffi_target.py registers with XLA, as the target
// "jax_hopper_gemm.v1.launch" and the type of its state.

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "cuda.h"
#include "driver.h"
#include "kernel_table.h"
#include "launch.h"
#include "plan.h"
#include "xla/ffi/api/c_api.h"
#include "xla/ffi/api/ffi.h"

namespace jax_hopper_gemm {
namespace {

namespace ffi = xla::ffi;

// Returns the error with what ran in front of it.
ffi::Error Named(std::string_view name, const ffi::Error& error) {
  return ffi::Error(*error.errc(),
                    "jax_hopper_gemm: " + std::string(name) + ": " + error.message());
}

// Runs once a call site, when XLA loads the program: all that can be done before addresses exist.
ffi::ErrorOr<std::unique_ptr<Launch>> Instantiate(std::string_view digest, std::string_view spec,
                                                  std::string_view name,
                                                  ffi::Span<const int64_t> words) {
  ffi::ErrorOr<Plan> plan = DecodePlan(words);
  if (plan.has_error()) return ffi::Unexpected(Named(name, plan.error()));
  const ffi::ErrorOr<const Driver*> driver = Driver::Get();
  if (driver.has_error()) return ffi::Unexpected(Named(name, driver.error()));
  const AnyContext context(**driver);
  const ffi::ErrorOr<CUkernel> kernel = FindKernel(digest, spec);
  if (kernel.has_error()) return ffi::Unexpected(Named(name, kernel.error()));
  auto launch = Launch::Create(**driver, name, *kernel, *std::move(plan));
  if (launch.has_error()) return ffi::Unexpected(Named(name, launch.error()));
  return launch;
}

ffi::Error Execute(CUstream stream, Launch* launch, ffi::RemainingArgs operands,
                   ffi::RemainingRets results, ffi::Dictionary /*attributes*/) {
  const ffi::Error error = launch->Run(stream, operands, results);
  return error.success() ? error : Named(launch->name(), error);
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate,
                       ffi::Ffi::BindInstantiate()
                           .Attr<std::string_view>("digest")
                           .Attr<std::string_view>("spec")
                           .Attr<std::string_view>("name")
                           .Attr<ffi::Span<const int64_t>>("plan"));

XLA_FFI_DEFINE_HANDLER(kExecute, Execute,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<CUstream>>()
                           .Ctx<ffi::State<Launch>>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs(),
                       {ffi::Traits::kCmdBufferCompatible});

// Runs a handler. What the standard library throws, bad_alloc, ends at this C boundary: the caller
// need not have been compiled to unwind.
XLA_FFI_Error* WithoutExceptions(XLA_FFI_Handler* handler, XLA_FFI_CallFrame* frame) {
  try {
    return handler(frame);
  } catch (const std::exception&) {
    XLA_FFI_Error_Create_Args args = {};
    args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
    args.message = "jax_hopper_gemm: no host memory is left";
    args.errc = XLA_FFI_Error_Code_RESOURCE_EXHAUSTED;
    return frame->api->XLA_FFI_Error_Create(&args);
  }
}

}  // namespace
}  // namespace jax_hopper_gemm

extern "C" XLA_FFI_Error* JhgLaunchInstantiate(XLA_FFI_CallFrame* frame) {
  return jax_hopper_gemm::WithoutExceptions(jax_hopper_gemm::kInstantiate, frame);
}

extern "C" XLA_FFI_Error* JhgLaunchExecute(XLA_FFI_CallFrame* frame) {
  return jax_hopper_gemm::WithoutExceptions(jax_hopper_gemm::kExecute, frame);
}

XLA_FFI_DECLARE_TYPE_ID_SYMBOL(JhgLaunchTypeId) { return &jax_hopper_gemm::Launch::id; }

XLA_FFI_DECLARE_TYPE_INFO_SYMBOL(JhgLaunchTypeInfo) {
  static const XLA_FFI_TypeInfo info = xla::ffi::MakeTypeInfo<jax_hopper_gemm::Launch>();
  return &info;
}
