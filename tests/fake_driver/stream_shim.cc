// Lets XLA's CPU runtime, which has no GPU stream, run an execute handler that asks for one: it
// passes the call on with an answer of its own to that question. It can also time the handler, and
// hand it an address that no allocator of XLA's would.

#include <algorithm>
#include <chrono>

#include "xla/ffi/api/c_api.h"

namespace {

XLA_FFI_Handler* handler = nullptr;
int misalignment = 0;
int timed_calls = 0;
double nanoseconds_a_call = 0;

XLA_FFI_Error* GetStream(XLA_FFI_Stream_Get_Args* args) {
  args->stream = reinterpret_cast<void*>(0x57EA);
  return nullptr;
}

}  // namespace

extern "C" {

void shim_set_handler(XLA_FFI_Handler* execute) { handler = execute; }

// Moves the first operand's address by so many bytes, from the next call on.
void shim_misalign(int bytes) { misalignment = bytes; }

// Makes the next call repeat the handler `calls` times; `shim_nanoseconds` then tells how long one
// took, in the fastest of ten batches.
void shim_time(int calls) { timed_calls = calls; }
double shim_nanoseconds() { return nanoseconds_a_call; }

XLA_FFI_Error* ShimExecute(XLA_FFI_CallFrame* frame) {
  if (frame->extension_start != nullptr) return handler(frame);  // asks for the handler's metadata
  XLA_FFI_Api api = *frame->api;
  api.XLA_FFI_Stream_Get = GetStream;
  const XLA_FFI_Api* real_api = frame->api;
  frame->api = &api;
  auto* first_operand = static_cast<XLA_FFI_Buffer*>(frame->args.args[0]);
  void* const data = first_operand->data;
  first_operand->data = static_cast<char*>(data) + misalignment;
  if (timed_calls > 0) {
    nanoseconds_a_call = 1e9;
    for (int batch = 0; batch < 10; ++batch) {
      const auto start = std::chrono::steady_clock::now();
      for (int i = 0; i < timed_calls; ++i) handler(frame);
      const std::chrono::duration<double, std::nano> time =
          std::chrono::steady_clock::now() - start;
      nanoseconds_a_call = std::min(nanoseconds_a_call, time.count() / timed_calls);
    }
    timed_calls = 0;
  }
  XLA_FFI_Error* error = handler(frame);
  first_operand->data = data;
  frame->api = real_api;
  return error;
}

}  // extern "C"
