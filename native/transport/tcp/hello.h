// The hello: how the two ends of a connection prove to each other that they belong to this job, before anything else is
// read. Pure: bytes go in, bytes come out; sockets and deadlines are door.cc's.
//
//   caller                                            answerer
//   greeting   who calls whom, epoch, lane, nonce  →
//                                                  ←  challenge  nonce
//   proof      HMAC(key, "proof", greeting, nonce) →
//                                                  ←  answer     HMAC(key, "answer", greeting, nonce)
//
// Both nonces and the whole greeting are under both proofs, so none can be replayed, moved to another connection or
// weakened on the way; the words "proof" and "answer" keep one from being sent back as the other. A stranger is given a
// random number and nothing else. Whoever calls proves first, and believes in the connection only after the answer: an
// answerer that gave up meanwhile is called again.
#ifndef RINGTRAIN_TRANSPORT_TCP_HELLO_H_
#define RINGTRAIN_TRANSPORT_TCP_HELLO_H_

#include <array>
#include <cstdint>
#include <string>

#include "transport/tcp/sha256.h"

namespace ringtrain {

using Nonce = std::array<uint8_t, 16>;
constexpr size_t kSecretBytes = 32;

// What a greeting claims.
struct Claim {
  uint32_t from = 0, to = 0;  // ranks
  uint64_t epoch = 0;
  uint8_t lane = 0;  // 0 for control records, others for tensor bytes

  bool operator==(const Claim& other) const {
    return from == other.from && to == other.to && epoch == other.epoch && lane == other.lane;
  }
};

// The key of all hellos of a job, made from its secret (kSecretBytes), which can be wiped then.
HmacKey HelloKey(const uint8_t* secret);

// One end of a hello. Give it exactly the bytes that it wants, in pieces of any size, and send what it says.
class Hello {
 public:
  enum class State { kTalking, kProven, kRefused };
  static constexpr size_t kGreetingBytes = 40, kMostBytes = 64;  // of a greeting, and of any part

  State state() const { return state_; }
  // Bytes that are still missing of the next part; 0 once it has ended.
  size_t wanted() const { return state_ == State::kTalking ? expected_ - heard_.size() : 0; }
  // Takes up to wanted() bytes. What is to be sent then is in Say.
  void Hear(const uint8_t* data, size_t bytes);
  // What is to be sent now; empty if nothing is.
  std::string Say();

  // After it was proven: who calls whom, and the key of the records on this connection.
  const Claim& claim() const { return claim_; }
  const HmacKey& record_key() const { return record_key_; }
  // After a refusal: why, as part of a sentence ("does not know the secret of this job").
  const char* reason() const { return reason_; }

 protected:
  Hello(const HmacKey& key, const Nonce& nonce) : key_(key), nonce_(nonce) {}
  ~Hello() = default;
  virtual void HeardAll(const std::string& part) = 0;
  void Expect(size_t bytes) { expected_ = bytes; }
  void Send(const std::string& part) { say_ += part; }
  void Refuse(const char* reason);
  void Prove();
  bool Proves(const std::string& part, const char* label) const;
  std::string Proof(const char* label) const;
  std::string NonceText() const { return {nonce_.begin(), nonce_.end()}; }

  Claim claim_;
  std::string greeting_, challenge_;  // as they were sent

 private:
  const HmacKey key_;
  const Nonce nonce_;
  State state_ = State::kTalking;
  size_t expected_ = 0;
  std::string heard_, say_;
  const char* reason_ = "";
  HmacKey record_key_;
};

// The end that opens the connection.
class HelloCaller final : public Hello {
 public:
  HelloCaller(const HmacKey& key, const Claim& claim, const Nonce& nonce);

 private:
  void HeardAll(const std::string& part) override;
};

// The other end: `rank` of `size` in `epoch`, which has `lanes` lanes beside lane 0.
class HelloAnswerer final : public Hello {
 public:
  HelloAnswerer(const HmacKey& key, uint32_t rank, uint32_t size, uint64_t epoch, int lanes, const Nonce& nonce);

  // Whether it has heard a greeting of this world.
  bool has_greeted() const { return !greeting_.empty(); }

 private:
  void HeardAll(const std::string& part) override;
  // Why the greeting is refused; nullptr if it is not.
  const char* Judge(const std::string& greeting);

  const uint32_t rank_, size_;
  const uint64_t epoch_;
  const int lanes_;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_TRANSPORT_TCP_HELLO_H_
