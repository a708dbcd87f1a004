#include "transport/tcp/hello.h"

#include <algorithm>
#include <utility>

#include "transport/tcp/little_endian.h"

namespace ringtrain {
namespace {

// Another version of anything that is said afterwards has another magic number, which is under the proofs.
constexpr char kMagic[8] = {'r', 't', '-', 't', 'c', 'p', '-', '1'};
constexpr size_t kNonceBytes = sizeof(Nonce), kProofBytes = sizeof(Digest);
static_assert(kNonceBytes <= Hello::kMostBytes && kProofBytes <= Hello::kMostBytes);

// Magic (8), nonce (16), epoch (8), lane and from (1 + 3), to (4).
std::string Greeting(const Claim& claim, const std::string& nonce) {
  std::string greeting(kMagic, sizeof kMagic);
  greeting += nonce;
  char numbers[16];
  PutNumber(claim.epoch, numbers);
  PutNumber(claim.from << 8 | claim.lane, numbers + 8);
  PutNumber(claim.to, numbers + 12);
  return greeting.append(numbers, sizeof numbers);
}

Claim ClaimOf(const std::string& greeting) {
  const char* numbers = greeting.data() + sizeof kMagic + kNonceBytes;
  Claim claim;
  claim.epoch = GetNumber<uint64_t>(numbers);
  const auto lane_and_from = GetNumber<uint32_t>(numbers + 8);
  claim.lane = static_cast<uint8_t>(lane_and_from);
  claim.from = lane_and_from >> 8;
  claim.to = GetNumber<uint32_t>(numbers + 12);
  return claim;
}

}  // namespace

HmacKey HelloKey(const uint8_t* secret) {
  Digest key = HmacKey(secret, kSecretBytes).Of("ringtrain tcp hello");
  const HmacKey made(key);
  Wipe(key.data(), key.size());
  return made;
}

// ---- both ends ----

void Hello::Hear(const uint8_t* data, size_t bytes) {
  heard_.append(reinterpret_cast<const char*>(data), std::min(bytes, wanted()));
  if (state_ == State::kTalking && heard_.size() == expected_) HeardAll(std::exchange(heard_, std::string()));
}

std::string Hello::Say() { return std::exchange(say_, std::string()); }

std::string Hello::Proof(const char* label) const {
  const Digest digest = key_.Of(std::string(label) + greeting_ + challenge_);
  return {digest.begin(), digest.end()};
}

bool Hello::Proves(const std::string& part, const char* label) const {
  const std::string proof = Proof(label);
  return part.size() == proof.size() && EqualInConstantTime(part.data(), proof.data(), proof.size());
}

void Hello::Refuse(const char* reason) {
  reason_ = reason;
  state_ = State::kRefused;
}

void Hello::Prove() {
  std::string key = Proof("record");
  record_key_ = HmacKey(key.data(), key.size());
  Wipe(&key[0], key.size());
  state_ = State::kProven;
}

// ---- the caller ----

HelloCaller::HelloCaller(const HmacKey& key, const Claim& claim, const Nonce& nonce) : Hello(key, nonce) {
  claim_ = claim;
  greeting_ = Greeting(claim, NonceText());
  Send(greeting_);
  Expect(kNonceBytes);
}

void HelloCaller::HeardAll(const std::string& part) {
  if (challenge_.empty()) {
    challenge_ = part;
    Send(Proof("proof"));
    return Expect(kProofBytes);
  }
  if (!Proves(part, "answer")) return Refuse("does not know the secret of this job");
  Prove();
}

// ---- the answerer ----

HelloAnswerer::HelloAnswerer(const HmacKey& key, uint32_t rank, uint32_t size, uint64_t epoch, int lanes,
                             const Nonce& nonce)
    : Hello(key, nonce), rank_(rank), size_(size), epoch_(epoch), lanes_(lanes) {
  Expect(kGreetingBytes);
}

void HelloAnswerer::HeardAll(const std::string& part) {
  if (greeting_.empty()) {
    const char* reason = Judge(part);
    if (reason != nullptr) return Refuse(reason);
    greeting_ = part;
    challenge_ = NonceText();
    Send(challenge_);
    return Expect(kProofBytes);
  }
  if (!Proves(part, "proof")) return Refuse("does not know the secret of this job");
  Send(Proof("answer"));
  Prove();
}

const char* HelloAnswerer::Judge(const std::string& greeting) {
  if (!std::equal(kMagic, kMagic + sizeof kMagic, greeting.begin())) return "does not speak this protocol";
  claim_ = ClaimOf(greeting);
  if (claim_.epoch != epoch_) return "belongs to another epoch";
  if (claim_.to != rank_) return "looks for another rank";
  if (claim_.from >= size_ || claim_.from == rank_) return "is no rank of this job";
  if (claim_.lane > lanes_) return "has more lanes than this rank";
  return nullptr;
}

}  // namespace ringtrain
