// A host of XLA FFI handlers in place of XLA: it loads and runs one call of the launcher. Direct
// launches and fuzzers use it, where XLA's compiler would take most of the time.

#include "ffi_host.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

struct XLA_FFI_Error {
  std::string message;
  XLA_FFI_Error_Code code;
};

namespace {

// What XLA has in an XLA_FFI_ExecutionContext, which is opaque to handlers.
struct Context {
  void* state;
  void* stream;
};

template <typename Args>
Context* ContextOf(Args* args) {
  return reinterpret_cast<Context*>(args->ctx);
}

XLA_FFI_Error* CreateError(XLA_FFI_Error_Create_Args* args) {
  return new XLA_FFI_Error{args->message, args->errc};
}

XLA_FFI_Error* GetStream(XLA_FFI_Stream_Get_Args* args) {
  args->stream = ContextOf(args)->stream;
  return nullptr;
}

XLA_FFI_Error* SetState(XLA_FFI_State_Set_Args* args) {
  ContextOf(args)->state = args->state;
  return nullptr;
}

XLA_FFI_Error* GetState(XLA_FFI_State_Get_Args* args) {
  args->state = ContextOf(args)->state;
  return nullptr;
}

XLA_FFI_Api MakeApi() {
  XLA_FFI_Api api = {};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR,
                     XLA_FFI_API_MINOR};
  api.XLA_FFI_Error_Create = CreateError;
  api.XLA_FFI_Stream_Get = GetStream;
  api.XLA_FFI_State_Set = SetState;
  api.XLA_FFI_State_Get = GetState;
  return api;
}

// The attributes of a call, sorted by name.
struct Attributes {
  Attributes(const char* digest, const char* spec, const char* name, const int64_t* words,
             int64_t count)
      : texts{{digest, std::strlen(digest)}, {name, std::strlen(name)}, {spec, std::strlen(spec)}},
        plan{XLA_FFI_DataType_S64, static_cast<size_t>(count), const_cast<int64_t*>(words)} {}

  XLA_FFI_ByteSpan texts[3];
  XLA_FFI_Array plan;
  XLA_FFI_ByteSpan names[4] = {{"digest", 6}, {"name", 4}, {"plan", 4}, {"spec", 4}};
  XLA_FFI_ByteSpan* name_pointers[4] = {&names[0], &names[1], &names[2], &names[3]};
  XLA_FFI_AttrType types[4] = {XLA_FFI_AttrType_STRING, XLA_FFI_AttrType_STRING,
                               XLA_FFI_AttrType_ARRAY, XLA_FFI_AttrType_STRING};
  void* values[4] = {&texts[0], &texts[1], &plan, &texts[2]};
};

XLA_FFI_CallFrame Frame(Context* context, XLA_FFI_ExecutionStage stage) {
  static const XLA_FFI_Api api = MakeApi();
  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.ctx = reinterpret_cast<decltype(frame.ctx)>(context);
  frame.stage = stage;
  frame.args.struct_size = XLA_FFI_Args_STRUCT_SIZE;
  frame.rets.struct_size = XLA_FFI_Rets_STRUCT_SIZE;
  frame.attrs.struct_size = XLA_FFI_Attrs_STRUCT_SIZE;
  return frame;
}

int Finish(XLA_FFI_Error* error, char* text, int64_t capacity) {
  if (error == nullptr) return 0;
  const int code = error->code;
  std::strncpy(text, error->message.c_str(), capacity - 1);
  text[capacity - 1] = '\0';
  delete error;
  return code;
}

}  // namespace

int ffi_host_load(XLA_FFI_Handler* instantiate, const char* digest, const char* spec,
                  const char* name, const int64_t* words, int64_t count, void** state, char* text,
                  int64_t capacity) {
  Attributes attributes(digest, spec, name, words, count);
  Context context = {};
  XLA_FFI_CallFrame frame = Frame(&context, XLA_FFI_ExecutionStage_INSTANTIATE);
  frame.attrs.size = 4;
  frame.attrs.types = attributes.types;
  frame.attrs.names = attributes.name_pointers;
  frame.attrs.attrs = attributes.values;
  const int code = Finish(instantiate(&frame), text, capacity);
  *state = context.state;
  return code;
}

int ffi_host_run(XLA_FFI_Handler* execute, void* state, void* stream, int64_t operands,
                 int64_t results, void* const* addresses, int64_t* bytes, char* text,
                 int64_t capacity) {
  const int64_t count = operands + results;
  std::vector<XLA_FFI_Buffer> buffers(count);
  std::vector<void*> pointers(count);
  for (int64_t i = 0; i < count; ++i) {
    buffers[i] = {
        XLA_FFI_Buffer_STRUCT_SIZE, nullptr, XLA_FFI_DataType_U8, addresses[i], 1, &bytes[i]};
    pointers[i] = &buffers[i];
  }
  std::vector<XLA_FFI_ArgType> arguments(operands, XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> returned(results, XLA_FFI_RetType_BUFFER);
  Context context = {state, stream};
  XLA_FFI_CallFrame frame = Frame(&context, XLA_FFI_ExecutionStage_EXECUTE);
  frame.args.size = operands;
  frame.args.types = arguments.data();
  frame.args.args = pointers.data();
  frame.rets.size = results;
  frame.rets.types = returned.data();
  frame.rets.rets = pointers.data() + operands;
  return Finish(execute(&frame), text, capacity);
}

void ffi_host_free(const XLA_FFI_TypeInfo* type, void* state) {
  if (state != nullptr) type->deleter(state);
}
