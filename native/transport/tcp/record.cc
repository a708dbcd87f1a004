#include "transport/tcp/record.h"

#include <algorithm>
#include <utility>

#include "transport/tcp/little_endian.h"

namespace ringtrain {

void RecordHeader::Encode(char* to) const {
  PutNumber(length, to);
  PutNumber(static_cast<uint32_t>(type), to + 4);
  PutNumber(epoch, to + 8);
  PutNumber(tag, to + 16);
  PutNumber(sequence, to + 20);
  PutNumber(offset, to + 24);
  PutNumber(total, to + 28);
}

bool RecordHeader::Decode(const char* from, RecordHeader* header) {
  const auto type = GetNumber<uint32_t>(from + 4);
  if (type < static_cast<uint32_t>(RecordType::kFrame) || type > static_cast<uint32_t>(RecordType::kOnCredit))
    return false;
  header->type = static_cast<RecordType>(type);
  header->length = GetNumber<uint32_t>(from);
  header->epoch = GetNumber<uint64_t>(from + 8);
  header->tag = GetNumber<uint32_t>(from + 16);
  header->sequence = GetNumber<uint32_t>(from + 20);
  header->offset = GetNumber<uint32_t>(from + 24);
  header->total = GetNumber<uint32_t>(from + 28);
  return true;
}

namespace {

Digest SealOf(const HmacKey& key, uint64_t count, const char* record, size_t bytes) {
  char place[sizeof count];
  PutNumber(count, place);
  Sha256 text = key.Begin();
  text.Update(place, sizeof place);
  text.Update(record, bytes);
  return key.Finish(&text);
}

}  // namespace

void RecordSealer::Seal(const RecordHeader& header, const char* payload, std::string* to) {
  const size_t begin = to->size(), added = RecordHeader::kBytes + header.length + RecordOpener::kSealBytes;
  if (to->capacity() < begin + added)
    to->reserve(std::max(2 * to->capacity(), begin + added));  // all of it, or nothing
  char encoded[RecordHeader::kBytes];
  header.Encode(encoded);
  to->append(encoded, sizeof encoded);
  to->append(payload, header.length);
  const Digest seal = SealOf(key_, count_++, to->data() + begin, to->size() - begin);
  to->append(reinterpret_cast<const char*>(seal.data()), RecordOpener::kSealBytes);
}

bool RecordOpener::Next(RecordHeader* header, std::string* payload) {
  if (fault_ != nullptr) return false;
  const char* record = bytes_.data() + read_;
  const size_t there = bytes_.size() - read_;
  if (there < RecordHeader::kBytes) return Wait();
  if (!RecordHeader::Decode(record, header)) return Fail("cannot be read");
  if (header->length > kMostPayload) return Fail("is too long");
  const size_t sealed = RecordHeader::kBytes + header->length;
  if (there < sealed + kSealBytes) return Wait();
  const Digest seal = SealOf(key_, count_++, record, sealed);
  if (!EqualInConstantTime(seal.data(), record + sealed, kSealBytes)) return Fail("has a wrong seal");
  payload->assign(record + RecordHeader::kBytes, header->length);
  read_ += sealed + kSealBytes;
  return true;
}

bool RecordOpener::Wait() {
  bytes_.erase(0, std::exchange(read_, 0));
  return false;
}

bool RecordOpener::Fail(const char* fault) {
  fault_ = fault;
  bytes_.clear();
  read_ = 0;
  return false;
}

bool FrameJoiner::Add(const RecordHeader& header, const std::string& payload, std::string* frame, bool* whole) {
  if (!header.Fits() || header.total > kMostBytes || header.offset != bytes_.size()) return false;
  if (header.length == 0 && header.total != 0) return false;
  if (header.offset > 0 && header.total != total_) return false;
  total_ = header.total;
  bytes_ += payload;
  *whole = bytes_.size() == header.total;
  if (*whole) *frame = std::exchange(bytes_, std::string());
  return true;
}

}  // namespace ringtrain
