// The operations as TensorFlow knows them. Loading this library defines them; tf.load_op_library then makes a Python
// function of each, and ringtrain/tensorflow/operations.py calls those.
//
// Every operation is stateful: constant folding must not run it ahead of time, nor pruning drop it on the one rank that
// does not use the result. TensorFlow lets stateful operations run one after the other, which would end both fusion and
// any freedom of order; but those that use a resource are ordered among the users of that resource alone. So in a graph
// each operation gets a resource of its own, its gate, and hundreds are in flight. Eager operations need none.
#include <algorithm>
#include <cctype>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "tables/tables.h"
#include "tensorflow/collective.h"
#include "tensorflow/core_link.h"
#include "tensorflow/kernel_api.h"
#include "tensorflow/shapes.h"
#include "tensorflow/step_row.h"

namespace ringtrain::tensorflow {
namespace {

struct OperationSpec {
  std::string name;
  Shapes shapes;
  std::vector<std::string> attributes;  // beside those that every operation has
  std::vector<std::string> inputs;      // beside the gates
  std::vector<std::string> outputs;
};

constexpr Operation kOperations[] = {
#define RT_OPERATION(name, id, text, reduces, rooted, layout, fuses, adjoint) Operation::name,
#include "tables/operations.def"
#undef RT_OPERATION
};
constexpr size_t kOperationCount = std::extent_v<decltype(kOperations)>;

// Process sets are made and removed by the program, and tensors sent between two ranks, not by a graph.
bool InGraphs(Operation operation) {
  return operation != Operation::kAddProcessSet && operation != Operation::kRemoveProcessSet &&
         operation != Operation::kSend && operation != Operation::kReceive;
}

// How TensorFlow declares an attribute of a request, by the type of its field in rt_request. Its attributes have single
// precision only, so factors travel as their bits. What is a member's own has no attribute: it would be an input.
std::string Declare(const char* name, double) { return std::string(name) + "_bits: int"; }
std::string Declare(const char* name, int32_t) { return std::string(name) + ": int"; }
std::string Declare(const char*, const int64_t*) { return ""; }

std::vector<std::string> AttributesOf(const OperationRow& operation) {
  std::vector<std::string> attributes;
#define RT_ATTRIBUTE(name, kind, initial, scope, label, advice) \
  if (Counts(Scope::scope, operation)) attributes.push_back(Declare(#name, decltype(rt_request::name){}));
#include "tables/attributes.def"
#undef RT_ATTRIBUTE
  attributes.erase(std::remove(attributes.begin(), attributes.end(), ""), attributes.end());
  return attributes;
}

Shapes ShapesOf(Operation operation) {
  const OperationRow& row = *Find(operation);
  if (row.layout == Layout::kExchange) return Shapes::kAlltoall;
  if (row.layout != Layout::kNone) return row.output == Output::kSame ? Shapes::kSame : Shapes::kRows;
  return operation == Operation::kJoin ? Shapes::kScalar : Shapes::kNone;
}

// "RingtrainAllreduce" of allreduce, and so on.
std::string NameOf(Operation operation) {
  std::string name = Text(operation);
  name[0] = static_cast<char>(std::toupper(static_cast<unsigned char>(name[0])));
  return "Ringtrain" + name;
}

OperationSpec SpecOf(Operation operation) {
  const OperationRow& row = *Find(operation);
  OperationSpec spec{NameOf(operation), ShapesOf(operation), AttributesOf(row), {}, {}};
  switch (spec.shapes) {
    case Shapes::kSame:
    case Shapes::kRows:
      // What the core lacks, or cannot reduce, is refused when it runs: a list of types has no room for float8_e5m2.
      spec.attributes.insert(spec.attributes.begin(), "T: list(type) >= 1");
      spec.inputs = {"tensors: T"};
      spec.outputs = {"results: T"};
      break;
    case Shapes::kAlltoall:
      spec.attributes.insert(spec.attributes.begin(), "T: type");
      spec.inputs = {"tensor: T", "splits: int64"};
      spec.outputs = {"rows: T", "received: int64"};
      break;
    case Shapes::kScalar:
      spec.outputs = {"last_rank: int32"};
      break;
    case Shapes::kStepRow:  // of no collective
    case Shapes::kNone:
      break;
  }
  return spec;
}

constexpr const char* kCommonAttributes[] = {"tensor_name: string", "slot: int", "process_set: int",
                                             "by_iteration: int", "G: int >= 0"};
constexpr char kGates[] = "gates: G * resource";
constexpr char kWorld[] = "RingtrainWorld";
constexpr char kStepRow[] = "RingtrainStepRow";
constexpr char kIsQuiet[] = "RingtrainIsQuiet";

// ---- attributes ----

int64_t ReadInteger(TF_OpKernelConstruction* construction, const char* name, const StatusPointer& status) {
  int64_t value = 0;
  if (Ok(status)) tf().TF_OpKernelConstruction_GetAttrInt64(construction, name, &value, status.get());
  return value;
}

void Read(TF_OpKernelConstruction* construction, const char* name, const StatusPointer& status, int32_t* value) {
  *value = static_cast<int32_t>(ReadInteger(construction, name, status));
}
void Read(TF_OpKernelConstruction* construction, const char* name, const StatusPointer& status, double* value) {
  const int64_t bits = ReadInteger(construction, (std::string(name) + "_bits").c_str(), status);
  std::memcpy(value, &bits, sizeof *value);
}
void Read(TF_OpKernelConstruction*, const char*, const StatusPointer&, const int64_t**) {}

template <typename Value>
void SetInitial(double initial, Value* value) {
  *value = static_cast<Value>(initial);
}
void SetInitial(double, const int64_t** own) { *own = nullptr; }

std::string ReadText(TF_OpKernelConstruction* construction, const char* name, const StatusPointer& status) {
  int32_t list_size = 0, bytes = 0;
  if (Ok(status)) tf().TF_OpKernelConstruction_GetAttrSize(construction, name, &list_size, &bytes, status.get());
  std::string text(static_cast<size_t>(bytes), '\0');
  if (Ok(status))
    tf().TF_OpKernelConstruction_GetAttrString(construction, name, text.data(), text.size(), status.get());
  return text;
}

// ---- collective kernels ----

// Where a kernel wants its tensors.
enum class Memory { kHost, kGpu };

template <size_t kIndex, Memory kMemory>
void* CreateCollective(TF_OpKernelConstruction* construction) {
  StatusPointer status = NewStatus();
  auto collective = std::make_unique<Collective>();
  collective->operation = kOperations[kIndex];
  collective->on_gpu = kMemory == Memory::kGpu;
  collective->name = ReadText(construction, "tensor_name", status);
  collective->by_iteration = ReadInteger(construction, "by_iteration", status) != 0;
  collective->slot = ReadInteger(construction, "slot", status);
  rt_request& request = collective->request;
  Read(construction, "process_set", status, &request.process_set);
  const OperationRow& operation = *Find(collective->operation);
#define RT_ATTRIBUTE(name, kind, initial, scope, label, advice) \
  SetInitial(initial, &request.name);                           \
  if (Counts(Scope::scope, operation)) Read(construction, #name, status, &request.name);
#include "tables/attributes.def"
#undef RT_ATTRIBUTE
  if (Ok(status)) return collective.release();
  tf().TF_OpKernelConstruction_Failure(construction, status.get());
  return nullptr;
}

void ComputeCollective(void* collective, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done) {
  Execution::Start(*static_cast<const Collective*>(collective), context, done);
}

void DeleteCollective(void* collective) { delete static_cast<Collective*>(collective); }

// ---- the world, asked when the graph runs ----

struct WorldQuestion {
  std::string what;
  int64_t slot = 0;
  int32_t process_set = 0;
};

void* CreateWorldQuestion(TF_OpKernelConstruction* construction) {
  StatusPointer status = NewStatus();
  auto question = std::make_unique<WorldQuestion>();
  question->what = ReadText(construction, "what", status);
  question->slot = ReadInteger(construction, "slot", status);
  question->process_set = static_cast<int32_t>(ReadInteger(construction, "process_set", status));
  if (Ok(status)) return question.release();
  tf().TF_OpKernelConstruction_Failure(construction, status.get());
  return nullptr;
}

// Horovod's numbers where there is no answer: -1 without a world, -2 for an unknown process set.
int32_t Answer(const WorldQuestion& question) {
  CoreLink& link = CoreLink::Get();
  return link.With(question.slot, [&](rt_context* context) -> int32_t {
    if (context == nullptr) return -1;
    rt_world world;
    link.functions().world_of(context, &world);
    if (question.what == "rank") return world.rank;
    if (question.what == "local_rank") return world.local_rank;
    if (question.what == "local_size") return world.local_size;
    std::vector<int32_t> members(static_cast<size_t>(world.size));
    const int32_t count = link.functions().process_set_ranks(context, question.process_set, members.data(), world.size);
    if (count < 0) return -2;
    if (question.what == "size") return count;
    for (int32_t index = 0; index < count; ++index)
      if (members[index] == world.rank) return 1;
    return 0;
  });
}

void ComputeAnswer(void* question, TF_OpKernelContext* context) {
  StatusPointer status = NewStatus();
  TensorPointer output(tf().TF_AllocateOutput(context, 0, TF_INT32, nullptr, 0, sizeof(int32_t), status.get()));
  if (Ok(status))
    *static_cast<int32_t*>(tf().TF_TensorData(output.get())) = Answer(*static_cast<const WorldQuestion*>(question));
  else
    tf().TF_OpKernelContext_Failure(context, status.get());
}

void DeleteWorldQuestion(void* question) { delete static_cast<WorldQuestion*>(question); }

// ---- registration ----

// The part of "name: type" before the colon.
std::string NameOf(const std::string& spec) { return spec.substr(0, spec.find(':')); }

void Define(const char* name, Shapes shapes, const std::vector<std::string>& attributes,
            const std::vector<std::string>& inputs, const std::vector<std::string>& outputs, bool is_stateful = true) {
  TF_OpDefinitionBuilder* builder = tf().TF_NewOpDefinitionBuilder(name);
  for (const std::string& attribute : attributes) tf().TF_OpDefinitionBuilderAddAttr(builder, attribute.c_str());
  for (const std::string& input : inputs) tf().TF_OpDefinitionBuilderAddInput(builder, input.c_str());
  for (const std::string& output : outputs) tf().TF_OpDefinitionBuilderAddOutput(builder, output.c_str());
  tf().TF_OpDefinitionBuilderSetIsStateful(builder, is_stateful);
  tf().TF_OpDefinitionBuilderSetShapeInferenceFunction(builder, InferenceFor(shapes));
  StatusPointer status = NewStatus();
  tf().TF_RegisterOpDefinition(builder, status.get());  // errors come out of tf.load_op_library
}

void RegisterKernel(TF_KernelBuilder* builder, const std::string& name, const std::vector<std::string>& on_host) {
  for (const std::string& tensor : on_host) tf().TF_KernelBuilder_HostMemory(builder, NameOf(tensor).c_str());
  StatusPointer status = NewStatus();
  tf().TF_RegisterKernelBuilder(name.c_str(), builder, status.get());
}

template <size_t kIndex, Memory kMemory>
TF_KernelBuilder* BuilderFor(const std::string& name, const char* device) {
  return tf().TF_NewAsyncKernelBuilder(name.c_str(), device, &CreateCollective<kIndex, kMemory>, &ComputeCollective,
                                       &DeleteCollective);
}

std::vector<std::string> InputsOf(const OperationSpec& spec) {
  std::vector<std::string> inputs = spec.inputs;
  inputs.push_back(kGates);
  return inputs;
}

template <size_t kIndex>
void DefineCollective() {
  if (!InGraphs(kOperations[kIndex])) return;
  const OperationSpec spec = SpecOf(kOperations[kIndex]);
  std::vector<std::string> attributes = spec.attributes;
  attributes.insert(attributes.end(), std::begin(kCommonAttributes), std::end(kCommonAttributes));
  Define(spec.name.c_str(), spec.shapes, attributes, InputsOf(spec), spec.outputs);
}

// A kernel for the GPU that asks for its tensors on the host lets TensorFlow make the copies, in the order of its
// streams. On the CPU one must not ask: TensorFlow takes it for another kind of memory than that of the inputs, and no
// longer gives theirs to the results.
//
// Tensors stay on the GPU where results have the shapes of their inputs. Of other operations the core would have to
// allocate the results, beside TensorFlow, which has taken nearly all of the GPU's memory. And where all tensors are
// int32: TensorFlow has these on the host, whatever device they are on.
template <size_t kIndex>
void RegisterCollective(bool tensors_stay_on_gpus) {
  if (!InGraphs(kOperations[kIndex])) return;
  const OperationSpec spec = SpecOf(kOperations[kIndex]);
  std::vector<std::string> everything = InputsOf(spec);
  everything.insert(everything.end(), spec.outputs.begin(), spec.outputs.end());
  RegisterKernel(BuilderFor<kIndex, Memory::kHost>(spec.name, "CPU"), spec.name + "CPU", {});
  TF_KernelBuilder* copying = BuilderFor<kIndex, Memory::kHost>(spec.name, "GPU");
  if (tensors_stay_on_gpus && spec.shapes == Shapes::kSame) {
    StatusPointer status = NewStatus();
    tf().TF_KernelBuilder_TypeConstraint(copying, "T", TF_INT32, status.get());
    tf().TF_KernelBuilder_Priority(copying, 1);
    RegisterKernel(BuilderFor<kIndex, Memory::kGpu>(spec.name, "GPU"), spec.name + "GPU", {kGates});
  }
  RegisterKernel(copying, spec.name + "GPUOnHost", everything);
}

void RegisterWorldQuestion() {
  for (const char* device : {"CPU", "GPU"})
    RegisterKernel(tf().TF_NewKernelBuilder(kWorld, device, &CreateWorldQuestion, &ComputeAnswer, &DeleteWorldQuestion),
                   std::string(kWorld) + device,
                   device == std::string("GPU") ? std::vector<std::string>{"answer"} : std::vector<std::string>{});
}

// Where calls of the host are made, too.
void RegisterStepRow() {
  RegisterKernel(tf().TF_NewKernelBuilder(kStepRow, "CPU", &CreateStepRow, &ComputeStepRow, &DeleteStepRow), kStepRow,
                 {});
  RegisterKernel(tf().TF_NewKernelBuilder(kIsQuiet, "CPU", nullptr, &ComputeIsQuiet, nullptr), kIsQuiet, {});
}

template <size_t... kIndices>
void DefineOperations(std::index_sequence<kIndices...>) {
  (DefineCollective<kIndices>(), ...);
  Define(kWorld, Shapes::kScalar, {"what: string", "slot: int", "process_set: int"}, {}, {"answer: int32"});
  Define(kStepRow, Shapes::kStepRow, {"digest: int", "schedule: int", "G: int >= 0"}, {"rate: double", kGates},
         {"row: uint8"});
  Define(kIsQuiet, Shapes::kScalar, {}, {"most: uint8"}, {"quiet: bool"}, false);
}

template <size_t... kIndices>
void RegisterKernels(bool tensors_stay_on_gpus, std::index_sequence<kIndices...>) {
  (RegisterCollective<kIndices>(tensors_stay_on_gpus), ...);
  RegisterWorldQuestion();
  RegisterStepRow();
}

// Runs while tf.load_op_library loads this library. With a function missing nothing is defined, and Python is told
// why.
[[maybe_unused]] const bool kDefined = [] {
  if (!tf().missing.empty()) return false;
  DefineOperations(std::make_index_sequence<kOperationCount>());
  return true;
}();

}  // namespace
}  // namespace ringtrain::tensorflow

#pragma GCC visibility push(default)
// Once, after tf.load_op_library. Where tensors may not stay on GPUs, TensorFlow copies them to the host and back.
extern "C" void rt_tensorflow_register_kernels(int32_t tensors_stay_on_gpus) {
  ringtrain::tensorflow::RegisterKernels(tensors_stay_on_gpus != 0,
                                         std::make_index_sequence<ringtrain::tensorflow::kOperationCount>());
}
#pragma GCC visibility pop
