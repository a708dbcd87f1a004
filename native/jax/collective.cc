#include "jax/collective.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>

#include "jax/attributes.h"
#include "jax/completions.h"
#include "jax/worlds.h"

namespace ringtrain::jax {
namespace {

struct DTypePair {
  Type xla;
  DType core;
};
constexpr DTypePair kDTypes[] = {
    {Type::kF32, DType::kFloat32},
    {Type::kF64, DType::kFloat64},
    {Type::kF16, DType::kFloat16},
    {Type::kBF16, DType::kBFloat16},
    {Type::kS32, DType::kInt32},
    {Type::kS64, DType::kInt64},
    {Type::kS16, DType::kInt16},
    {Type::kS8, DType::kInt8},
    {Type::kU8, DType::kUInt8},
    {Type::kPred, DType::kBool},
    {Type::kU16, DType::kUInt16},
    {Type::kU32, DType::kUInt32},
    {Type::kU64, DType::kUInt64},
    {Type::kC64, DType::kComplex64},
    {Type::kC128, DType::kComplex128},
    {Type::kF8E4M3FN, DType::kFloat8E4M3FN},
    {Type::kF8E4M3FNUZ, DType::kFloat8E4M3FNUZ},
    {Type::kF8E5M2, DType::kFloat8E5M2},
    {Type::kF8E5M2FNUZ, DType::kFloat8E5M2FNUZ},
    {Type::kF8E8M0FNU, DType::kFloat8E8M0FNU},
};

struct CodePair {
  StatusCode core;
  Code xla;
};
// ABORTED stands for what became of another rank: ringtrain/jax/library.py knows it by that.
constexpr CodePair kCodes[] = {
    {StatusCode::kInvalidArgument, Code::kInvalidArgument},
    {StatusCode::kMismatch, Code::kFailedPrecondition},
    {StatusCode::kUnsupported, Code::kUnimplemented},
    {StatusCode::kTimeout, Code::kDeadlineExceeded},
    {StatusCode::kPeerLost, Code::kAborted},
    {StatusCode::kClosed, Code::kAborted},
};

Code CodeFor(StatusCode code) {
  for (const CodePair& pair : kCodes)
    if (pair.core == code) return pair.xla;
  return Code::kInternal;
}

// What the last operation that failed with ABORTED was told. XLA keeps an error's text, but not its code, where a later
// program takes its result; by this text Python knows it again.
class LastAbort {
 public:
  // Never destroyed: XLA's threads outlive static objects.
  static LastAbort& Get() {
    static auto* one = new LastAbort;
    return *one;
  }
  void Note(const std::string& text) {
    std::lock_guard<std::mutex> lock(mutex_);
    text_ = text;
  }
  int64_t Copy(char* text, int64_t capacity) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (capacity > 0) text[text_.copy(text, static_cast<size_t>(capacity) - 1)] = 0;
    return static_cast<int64_t>(text_.size());
  }

 private:
  std::mutex mutex_;
  std::string text_;  // guarded by mutex_
};

template <typename Value>
void SetInitial(double initial, Value* value) {
  *value = static_cast<Value>(initial);
}
void SetInitial(double, const int64_t** value) { *value = nullptr; }

std::string ShapeText(int64_t ndim, const int64_t* shape) {
  std::string text = "[";
  for (int64_t dimension = 0; dimension < ndim; ++dimension)
    text += (dimension == 0 ? "" : ", ") + std::to_string(shape[dimension]);
  return text + "]";
}

void Clear(const Buffer& buffer) {
  size_t bytes = 0;
  for (const DTypePair& pair : kDTypes)
    if (pair.xla == buffer.dtype) bytes = Bytes(pair.core);
  for (int64_t dimension = 0; dimension < buffer.rank; ++dimension) bytes *= buffer.dimensions[dimension];
  if (bytes != 0) std::memset(buffer.data, 0, bytes);
}

void Complete(const Api& api, Future* future, Error* error) {
  if (error == nullptr) {
    FutureSetAvailable available{sizeof available, nullptr, future};
    api.future_set_available(&available);
  } else {
    FutureSetError failed{sizeof failed, nullptr, future, error};
    api.future_set_error(&failed);
  }
}

}  // namespace

Error* Execution::Start(CallFrame* frame) {
  auto execution = std::unique_ptr<Execution>(new Execution(*frame));
  if (!execution->ReadAttributes(frame->attributes) || !execution->TakeInputs(frame->arguments) ||
      !execution->HasCompletions() || !execution->MakeFuture())
    return execution->NewError();
  frame->future = execution->future_;  // XLA's from now on: nothing but the result of a call frees it
  bool submitted = false;
  try {
    submitted = execution->Submit();
  } catch (const std::bad_alloc&) {
    execution->FailForMemory();
  }
  if (!submitted) execution->parts_left_.store(1);  // nobody will call back
  execution.release()->EndPart();
  return nullptr;
}

bool Execution::ReadAttributes(const Attributes& attributes) {
  AttributeReader reader(attributes);
  reader.Read("name", &name_);
  reader.Read("slot", &slot_);
  reader.Read("keeps", &keeps_);
  reader.Read("operation", &request_.operation);
  reader.Read("process_set", &request_.process_set);
#define RT_ATTRIBUTE(name, kind, initial, scope, label, advice) \
  SetInitial(initial, &request_.name);                          \
  reader.Read(#name, &request_.name);
#include "tables/attributes.def"
#undef RT_ATTRIBUTE
  if (reader.missing().empty()) return true;
  return Fail(StatusCode::kInternal, "the attribute " + reader.missing() + " is missing, or of another type. The " +
                                         "program was compiled by another version of ringtrain: compile it again.");
}

bool Execution::TakeInputs(const Arguments& arguments) {
  const std::vector<const Buffer*> inputs = All(arguments);  // as many as results, by how it is compiled
  tensors_.reserve(inputs.size());
  for (size_t place = 0; place < inputs.size(); ++place)
    if (!TakeInput(*inputs[place], *outputs_[place])) return false;
  return true;
}

bool Execution::TakeInput(const Buffer& input, const Buffer& output) {
  const auto* pair = std::find_if(std::begin(kDTypes), std::end(kDTypes),
                                  [&](const DTypePair& each) { return each.xla == input.dtype; });
  if (pair == std::end(kDTypes))
    return Fail(StatusCode::kUnsupported, Subject() + ": XLA's dtype " +
                                              std::to_string(static_cast<int32_t>(input.dtype)) +
                                              " has no counterpart. Cast the array first.");
  rt_tensor& tensor = tensors_.emplace_back();
  tensor.data = input.data;
  tensor.output = Find(operation())->output == Output::kSame ? output.data : nullptr;
  tensor.dtype = static_cast<int32_t>(pair->core);
  tensor.device = -1;
  tensor.ndim = static_cast<int32_t>(input.rank);
  tensor.shape = input.dimensions;
  return true;
}

bool Execution::HasCompletions() {
  if (Completions::Get().Ready()) return true;
  return Fail(StatusCode::kInternal, Subject() + ": this process must have room for one more thread, but has none. " +
                                         "Raise its limit (ulimit -u), or that of its container.");
}

bool Execution::MakeFuture() {
  FutureCreate create{sizeof create, nullptr, nullptr};
  if (api_.future_create(&create) != nullptr)
    return Fail(StatusCode::kInternal, Subject() + ": XLA could not make a future.");
  future_ = create.future;
  return true;
}

bool Execution::Submit() {
  Worlds& worlds = Worlds::Get();
  request_.name = name_.c_str();
  request_.tensor_count = static_cast<int32_t>(tensors_.size());
  request_.tensors = tensors_.data();
  request_.cacheable = 1;
  request_.allocate = &Execution::OnAllocate;
  request_.done = &Execution::OnDone;
  request_.callback_context = this;
  return worlds.With(slot_, [&](rt_context* context) {
    if (context == nullptr) return Fail(StatusCode::kClosed, Subject() + ": there is no world. Call init() first.");
    char* error = nullptr;
    const int32_t status = worlds.functions().submit(context, &request_, &handle_, &error);
    if (status == 0) return true;
    Fail(static_cast<StatusCode>(status), error == nullptr ? "" : error);
    worlds.functions().free(error);
    return false;
  });
}

// A program is compiled for results of one shape.
void* Execution::Allocate(const Buffer& output, int32_t ndim, const int64_t* shape) {
  static char nothing;  // an empty array has no memory, and the core takes NULL for a failure
  if (ndim == output.rank && std::equal(shape, shape + ndim, output.dimensions))
    return output.data == nullptr ? &nothing : output.data;
  Fail(StatusCode::kMismatch,
       Subject() + ": the result must have the shape " + ShapeText(output.rank, output.dimensions) +
           ", for which the program was compiled, but has " + ShapeText(ndim, shape) +
           ". Give an array of one shape on every rank; if the number of ranks has changed, call jax.clear_caches().");
  return nullptr;
}

void* Execution::OnAllocate(void* execution, int32_t tensor, int32_t ndim, const int64_t* shape) {
  auto* self = static_cast<Execution*>(execution);
  try {
    return self->Allocate(*self->outputs_[static_cast<size_t>(tensor)], ndim, shape);
  } catch (const std::bad_alloc&) {
    self->FailForMemory();
    return nullptr;
  }
}

void Execution::OnDone(void* execution, int32_t status, const char* error) {
  auto* self = static_cast<Execution*>(execution);
  try {
    if (status != 0) self->Fail(static_cast<StatusCode>(status), error == nullptr ? "" : error);
  } catch (const std::bad_alloc&) {
    self->FailForMemory();
  }
  self->EndPart();
}

// The submission returns and the operation ends in either order; the later of the two finishes.
void Execution::EndPart() {
  if (parts_left_.fetch_sub(1, std::memory_order_acq_rel) == 1) Finish();
}

void Execution::Finish() {
  if (handle_ != nullptr) Worlds::Get().functions().handle_free(handle_);
  if (keeps_ == 0 && code_ == StatusCode::kOk)
    for (const Buffer* output : outputs_) Clear(*output);
  Error* const error = code_ == StatusCode::kOk ? nullptr : NewError();
  try {
    Completions::Get().Add([&api = api_, future = future_, error] { Complete(api, future, error); });
  } catch (const std::bad_alloc&) {  // here, rather than never
    Complete(api_, future_, error);
  }
  delete this;
}

// The first failure counts. Returns false.
bool Execution::Fail(StatusCode code, const std::string& text) {
  if (code_ != StatusCode::kOk) return false;
  code_ = code;
  error_ = text;
  if (CodeFor(code) == Code::kAborted) LastAbort::Get().Note(text);
  return false;
}

// Unless it has failed before. The text needs no memory.
void Execution::FailForMemory() {
  if (code_ == StatusCode::kOk) code_ = StatusCode::kInternal;
  if (error_.empty()) error_ = "no memory left.";
}

Error* Execution::NewError() const {
  ErrorCreate create{sizeof create, nullptr, error_.c_str(), CodeFor(code_)};
  return api_.error_create(&create);
}

#pragma GCC visibility push(default)
extern "C" {

// The handler that ringtrain/jax/library.py registers with XLA.
Error* rt_jax_collective(CallFrame* frame) {
  if (AnsweredMetadata(frame)) return nullptr;
  try {
    return Execution::Start(frame);
  } catch (const std::bad_alloc&) {
    ErrorCreate create{sizeof create, nullptr, "no memory left.", CodeFor(StatusCode::kInternal)};
    return frame->api->error_create(&create);
  }
}

// Copies the text of the last abort, cut to `capacity` with its 0; returns its bytes.
int64_t rt_jax_last_abort(char* text, int64_t capacity) { return LastAbort::Get().Copy(text, capacity); }

}  // extern "C"
#pragma GCC visibility pop

}  // namespace ringtrain::jax
