#include "agree/request.h"

#include <algorithm>
#include <numeric>
#include <type_traits>

#include "include/ringtrain.h"

namespace ringtrain {
namespace {

int64_t ElementsFrom(const Shape& shape, size_t first) {
  int64_t elements = 1;
  for (size_t dimension = first; dimension < shape.size(); ++dimension) elements *= shape[dimension];
  return elements;
}

// ---- the bytes of an attribute, by its type ----

template <typename Enum, typename = std::enable_if_t<std::is_enum_v<Enum>>>
void Put(Enum value, Encoder* encoder) {
  encoder->Byte(static_cast<uint8_t>(value));
}
void Put(double value, Encoder* encoder) { encoder->Number(value); }
void Put(int64_t value, Encoder* encoder) { encoder->Signed(value); }
void Put(int value, Encoder* encoder) { encoder->Signed(value); }

template <typename Enum, typename = std::enable_if_t<std::is_enum_v<Enum>>>
void Get(Decoder* decoder, Enum* value) {
  *value = static_cast<Enum>(decoder->Byte());
  if (Text(*value) == nullptr) decoder->Refuse();
}
void Get(Decoder* decoder, double* value) { *value = decoder->Number(); }
void Get(Decoder* decoder, int64_t* value) { *value = decoder->Signed(); }
void Get(Decoder* decoder, int* value) { *value = decoder->Int(); }

}  // namespace

int64_t TensorSpec::elements() const { return ElementsFrom(shape, 0); }
int64_t TensorSpec::row_elements() const { return ElementsFrom(shape, 1); }

std::string TensorSpec::Text() const {
  std::string text = std::string(ringtrain::Text(dtype)) + "[";
  for (size_t dimension = 0; dimension < shape.size(); ++dimension)
    text += (dimension > 0 ? ", " : "") + std::to_string(shape[dimension]);
  return text + "]";
}

bool Request::operator==(const Request& other) const {
#define RT_ATTRIBUTE(attribute, kind, initial, scope, label, advice) \
  if (attribute != other.attribute) return false;
#include "tables/attributes.def"
#undef RT_ATTRIBUTE
  return operation == other.operation && device == other.device && cacheable == other.cacheable && name == other.name &&
         tensors == other.tensors && splits == other.splits;
}

namespace {

// A name as it stands in a message: control characters would move the cursor of a terminal, or make a second line.
std::string Printable(const std::string& name) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const char letter : name) {
    const auto byte = static_cast<unsigned char>(letter);
    if (byte >= 0x20 && byte != 0x7f) {
      text += letter;
    } else {
      text.append("\\x").append(1, kDigits[byte >> 4]).append(1, kDigits[byte & 15]);
    }
  }
  return text;
}

}  // namespace

std::string Request::Subject() const { return std::string(Text(operation)) + " '" + Printable(name) + "'"; }

size_t Request::bytes() const {
  size_t bytes = 0;
  for (const TensorSpec& tensor : tensors) bytes += tensor.bytes();
  return bytes;
}

std::vector<int64_t> Request::own_rows() const {
  const Layout layout = Find(operation)->layout;
  if (layout == Layout::kExchange) return splits;
  std::vector<int64_t> rows;
  if (layout == Layout::kGather)
    for (const TensorSpec& tensor : tensors) rows.push_back(tensor.shape[0]);
  return rows;
}

void Request::set_own_rows(const int64_t* rows) {
  const Layout layout = Find(operation)->layout;
  if (layout == Layout::kExchange) {
    std::copy_n(rows, splits.size(), splits.begin());
    tensors[0].shape[0] = std::accumulate(splits.begin(), splits.end(), int64_t{0});
  }
  if (layout == Layout::kGather)
    for (TensorSpec& tensor : tensors) tensor.shape[0] = *rows++;
}

Response Response::For(int member, int members) const {
  Response told = *this;
  if (exchanged == nullptr) return told;
  told.request = RequestOf(member, members);
  for (int from = 0; from < members; ++from)
    told.rows[from] = (*exchanged)[static_cast<size_t>(from) * members + member];
  told.exchanged.reset();
  return told;
}

Request Response::RequestOf(int member, int members) const {
  Request mine = request;
#define RT_ATTRIBUTE(name, kind, initial, scope, label, advice)
#define RT_OWN_ATTRIBUTE(name, kind, initial, scope, label, advice) \
  if (!name##s.empty()) mine.name = name##s[member];
#include "tables/attributes.def"
#undef RT_ATTRIBUTE
  if (!devices.empty()) mine.device = static_cast<int>(devices[member]);
  if (Find(request.operation)->layout == Layout::kGather)
    mine.set_own_rows(rows.data() + rows.size() / members * member);
  if (exchanged != nullptr) mine.set_own_rows(exchanged->data() + static_cast<size_t>(members) * member);
  return mine;
}

bool Response::IsOf(int member, int members, const Request& one) const {
  bool alike = rows.empty() && devices.empty();
#define RT_ATTRIBUTE(name, kind, initial, scope, label, advice)
#define RT_OWN_ATTRIBUTE(name, kind, initial, scope, label, advice) alike = alike && name##s.empty();
#include "tables/attributes.def"
#undef RT_ATTRIBUTE
  return (alike ? request : RequestOf(member, members)) == one;
}

void Encode(const TensorSpec& tensor, Encoder* encoder) {
  encoder->Byte(static_cast<uint8_t>(tensor.dtype));
  encoder->SignedList(tensor.shape);
}

TensorSpec DecodeTensor(Decoder* decoder) {
  TensorSpec tensor;
  tensor.dtype = static_cast<DType>(decoder->Byte());
  tensor.shape = Shape(decoder->SignedList());
  if (Find(tensor.dtype) == nullptr || tensor.shape.size() > RT_MAX_DIMENSIONS) decoder->Refuse();
  return tensor;
}

void Encode(const Request& request, Encoder* encoder) {
  encoder->Text(request.name);
  encoder->Byte(static_cast<uint8_t>(request.operation));
#define RT_ATTRIBUTE(name, kind, initial, scope, label, advice) Put(request.name, encoder);
#include "tables/attributes.def"
#undef RT_ATTRIBUTE
  encoder->Signed(request.device);
  encoder->Byte(request.cacheable);
  encoder->Unsigned(request.tensors.size());
  for (const TensorSpec& tensor : request.tensors) Encode(tensor, encoder);
  encoder->SignedList(request.splits);
}

Request DecodeRequest(Decoder* decoder) {
  Request request;
  request.name = decoder->Text();
  request.operation = static_cast<Operation>(decoder->Byte());
#define RT_ATTRIBUTE(name, kind, initial, scope, label, advice) Get(decoder, &request.name);
#include "tables/attributes.def"
#undef RT_ATTRIBUTE
  request.device = decoder->Int();
  request.cacheable = decoder->Flag();
  request.tensors.resize(decoder->Count());
  for (TensorSpec& tensor : request.tensors) tensor = DecodeTensor(decoder);
  request.splits = decoder->SignedList();
  if (Find(request.operation) == nullptr) decoder->Refuse();
  return request;
}

void Encode(const Response& response, Encoder* encoder) {
  Encode(response.request, encoder);
  encoder->SignedList(response.rows);
#define RT_ATTRIBUTE(name, kind, initial, scope, label, advice)
#define RT_OWN_ATTRIBUTE(name, kind, initial, scope, label, advice) encoder->SignedList(response.name##s);
#include "tables/attributes.def"
#undef RT_ATTRIBUTE
  encoder->SignedList(response.devices);
  encoder->Signed(response.result);
}

Response DecodeResponse(Decoder* decoder) {
  Response response;
  response.request = DecodeRequest(decoder);
  response.rows = decoder->SignedList();
#define RT_ATTRIBUTE(name, kind, initial, scope, label, advice)
#define RT_OWN_ATTRIBUTE(name, kind, initial, scope, label, advice) response.name##s = decoder->SignedList();
#include "tables/attributes.def"
#undef RT_ATTRIBUTE
  response.devices = decoder->SignedList();
  response.result = decoder->Int();
  return response;
}

}  // namespace ringtrain
