// A host of XLA FFI handlers in place of XLA.

#ifndef TESTS_FAKE_DRIVER_FFI_HOST_H_
#define TESTS_FAKE_DRIVER_FFI_HOST_H_

#include <cstdint>

#include "xla/ffi/api/c_api.h"

extern "C" {

// Loads a call: its instantiate stage. Returns 0 and the state, else an XLA_FFI_Error_Code and its
// text.
int ffi_host_load(XLA_FFI_Handler* instantiate, const char* digest, const char* spec,
                  const char* name, const int64_t* words, int64_t count, void** state, char* text,
                  int64_t capacity);

// Runs a loaded call on buffers of so many bytes, operands first.
int ffi_host_run(XLA_FFI_Handler* execute, void* state, void* stream, int64_t operands,
                 int64_t results, void* const* addresses, int64_t* bytes, char* text,
                 int64_t capacity);

void ffi_host_free(const XLA_FFI_TypeInfo* type, void* state);

}  // extern "C"

#endif  // TESTS_FAKE_DRIVER_FFI_HOST_H_
