// What a TCP connection begins with: SHA-256 and HMAC against the published vectors, and the hello with honest ends,
// strangers, and everything that somebody between them may do.
#include "transport/tcp/hello.h"

#include <map>
#include <vector>

#include "check.h"
#include "transport/tcp/strangers.h"

using namespace ringtrain;

namespace {

std::string Hex(const Digest& digest) {
  std::string text;
  for (uint8_t byte : digest)
    for (int nibble : {byte >> 4, byte & 15}) text += "0123456789abcdef"[nibble];
  return text;
}

std::string Bytes(const std::string& digits) {
  std::string bytes;
  for (size_t place = 0; place < digits.size(); place += 2)
    bytes += static_cast<char>(std::stoi(digits.substr(place, 2), nullptr, 16));
  return bytes;
}

std::string HashOf(const std::string& text, size_t step) {
  Sha256 hash;
  for (size_t begin = 0; begin < text.size(); begin += step)
    hash.Update(text.data() + begin, std::min(step, text.size() - begin));
  return Hex(hash.Finish());
}

std::string HmacOf(const std::string& key, const std::string& text) {
  return Hex(HmacKey(key.data(), key.size()).Of(text));
}

HmacKey KeyOfJob(uint8_t job) {
  uint8_t secret[kSecretBytes] = {job};
  return HelloKey(secret);
}

Nonce NonceOf(uint8_t first) { return {first}; }

// What was sent last, in either direction.
struct Part {
  bool to_answerer;
  std::string bytes;
};

// Carries bytes between two ends, `step` at a time, until neither has anything to say; `touch` may change each part.
template <typename Touch>
std::vector<Part> Talk(Hello& caller, Hello& answerer, size_t step, Touch touch) {
  std::vector<Part> said;
  for (;;) {
    Part part = {true, caller.Say()};
    if (part.bytes.empty()) part = {false, answerer.Say()};
    if (part.bytes.empty()) return said;
    RT_CHECK(part.bytes.size() <= Hello::kMostBytes);
    said.push_back(part);
    touch(&part);
    Hello& to = part.to_answerer ? answerer : caller;
    for (size_t begin = 0; begin < part.bytes.size(); begin += step) {
      const std::string piece = part.bytes.substr(begin, step);
      to.Hear(reinterpret_cast<const uint8_t*>(piece.data()), piece.size());
    }
  }
}

std::vector<Part> Talk(Hello& caller, Hello& answerer, size_t step = 64) {
  return Talk(caller, answerer, step, [](Part*) {});
}

void Give(Hello& to, const std::string& bytes) {
  to.Hear(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
}

const Claim kClaim = {1, 2, UINT64_C(0x123456789abcdef0), 3};

HelloCaller Caller(uint8_t nonce = 1, const Claim& claim = kClaim, uint8_t job = 7) {
  return {KeyOfJob(job), claim, NonceOf(nonce)};
}
HelloAnswerer Answerer(uint8_t nonce = 2, uint8_t job = 7) {
  return {KeyOfJob(job), kClaim.to, 4, kClaim.epoch, 3, NonceOf(nonce)};
}

}  // namespace

RT_TEST(sha256_gives_the_published_digests) {
  const std::pair<std::string, const char*> vectors[] = {
      {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
      {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
      {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
       "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
      {"abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopqrst"
       "u",
       "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1"},
      {std::string(1000000, 'a'), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"},
  };
  for (const auto& vector : vectors)
    for (size_t step : {1, 3, 63, 64, 65, 1000}) RT_CHECK_EQ(HashOf(vector.first, step), std::string(vector.second));
}

// The digests above are by the fastest one.
RT_TEST(blocks_are_compressed_alike_with_and_without_the_processors_instructions) {
  std::vector<uint8_t> blocks(5 * kSha256Block);
  std::array<uint32_t, 8> plain, fastest;
  uint32_t drawn = 1;
  const auto draw = [&] { return drawn = drawn * 1664525 + 1013904223; };
  for (int turn = 0; turn < 200; ++turn) {
    for (uint8_t& byte : blocks) byte = static_cast<uint8_t>(draw() >> 24);
    for (uint32_t& word : plain) word = draw();
    fastest = plain;
    const size_t count = static_cast<size_t>(turn % 6);
    PlainSha256Blocks(plain.data(), blocks.data(), count);
    FastestSha256Blocks()(fastest.data(), blocks.data(), count);
    RT_CHECK(plain == fastest);
  }
}

RT_TEST(hmac_gives_the_digests_of_rfc_4231) {
  std::string counting;
  for (char byte = 1; byte <= 25; ++byte) counting += byte;
  RT_CHECK_EQ(HmacOf(std::string(20, '\x0b'), "Hi There"),
              std::string("b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"));
  RT_CHECK_EQ(HmacOf("Jefe", "what do ya want for nothing?"),
              std::string("5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"));
  RT_CHECK_EQ(HmacOf(std::string(20, '\xaa'), std::string(50, '\xdd')),
              std::string("773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"));
  RT_CHECK_EQ(HmacOf(counting, std::string(50, '\xcd')),
              std::string("82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b"));
  RT_CHECK_EQ(HmacOf(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First"),
              std::string("60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"));
  RT_CHECK_EQ(HmacOf(std::string(131, '\xaa'),
                     "This is a test using a larger than block-size key and a larger than block-size data. The key "
                     "needs to be hashed before being used by the HMAC algorithm."),
              std::string("9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2"));
}

RT_TEST(comparison_sees_every_bit) {
  const std::string one(32, 'x');
  RT_CHECK(EqualInConstantTime(one.data(), std::string(32, 'x').data(), 32));
  for (size_t byte = 0; byte < 32; ++byte)
    for (int bit = 0; bit < 8; ++bit) {
      std::string other = one;
      other[byte] = static_cast<char>(other[byte] ^ (1 << bit));
      RT_CHECK(!EqualInConstantTime(one.data(), other.data(), 32));
    }
}

RT_TEST(the_bytes_are_those_of_the_vectors) {  // which ringtrain/_rendezvous/handshake.py says, too
  std::map<std::string, std::string> vectors;
#define VECTOR(name, digits) vectors[#name] = Bytes(digits);
#include "handshake_vectors.def"
#undef VECTOR
  HelloCaller caller = Caller();
  HelloAnswerer answerer = Answerer();
  const std::vector<Part> said = Talk(caller, answerer);
  const char* names[] = {"greeting", "challenge", "proof", "answer"};
  RT_CHECK_EQ(said.size(), size_t{4});
  for (size_t part = 0; part < 4; ++part) RT_CHECK(said[part].bytes == vectors[names[part]]);
  const std::string& key = vectors["record_key"];
  RT_CHECK_EQ(Hex(caller.record_key().Of("x")), HmacOf(key, "x"));
  RT_CHECK_EQ(Hex(answerer.record_key().Of("x")), HmacOf(key, "x"));
}

RT_TEST(honest_ends_prove_themselves_and_share_a_key) {
  for (size_t step : {1, 7, 64}) {
    HelloCaller caller = Caller();
    HelloAnswerer answerer = Answerer();
    RT_CHECK_EQ(answerer.wanted(), Hello::kGreetingBytes);
    Talk(caller, answerer, step);
    RT_CHECK(caller.state() == Hello::State::kProven);
    RT_CHECK(answerer.state() == Hello::State::kProven);
    RT_CHECK(answerer.claim() == kClaim);
    RT_CHECK_EQ(Hex(caller.record_key().Of("x")), Hex(answerer.record_key().Of("x")));
    RT_CHECK_EQ(caller.wanted() + answerer.wanted(), size_t{0});
  }
}

RT_TEST(each_connection_has_a_key_of_its_own) {
  HelloCaller caller = Caller(), again = Caller(3);
  HelloAnswerer answerer = Answerer(), answerer_again = Answerer();
  Talk(caller, answerer);
  Talk(again, answerer_again);
  RT_CHECK(Hex(caller.record_key().Of("x")) != Hex(again.record_key().Of("x")));
}

RT_TEST(whoever_lacks_the_secret_is_refused_by_either_end) {
  HelloCaller stranger = Caller(1, kClaim, 8);
  HelloAnswerer answerer = Answerer();
  Talk(stranger, answerer);
  RT_CHECK(answerer.state() == Hello::State::kRefused);
  RT_CHECK_EQ(std::string(answerer.reason()), std::string("does not know the secret of this job"));
  RT_CHECK(stranger.state() ==
           Hello::State::kTalking);  // it has learnt a random number, and nothing that is made of the key

  HelloCaller caller = Caller();
  const std::string greeting = caller.Say();
  Give(caller, std::string(16, 'n'));
  caller.Say();
  Give(caller, std::string(32, 'a'));
  RT_CHECK(caller.state() == Hello::State::kRefused);
}

RT_TEST(a_claim_that_does_not_fit_is_refused_before_any_answer) {
  const std::pair<Claim, const char*> claims[] = {{{1, 3, kClaim.epoch, 0}, "looks for another rank"},
                                                  {{4, 2, kClaim.epoch, 0}, "is no rank of this job"},
                                                  {{2, 2, kClaim.epoch, 0}, "is no rank of this job"},
                                                  {{1, 2, kClaim.epoch + 1, 0}, "belongs to another epoch"},
                                                  {{1, 2, kClaim.epoch, 4}, "has more lanes than this rank"}};
  for (const auto& each : claims) {
    HelloCaller caller = Caller(1, each.first);
    HelloAnswerer answerer = Answerer();
    RT_CHECK_EQ(Talk(caller, answerer).size(), size_t{1});
    RT_CHECK(answerer.state() == Hello::State::kRefused);
    RT_CHECK_EQ(std::string(answerer.reason()), std::string(each.second));
  }
  HelloAnswerer answerer = Answerer();
  Give(answerer, std::string("GET / HTTP/1.1\r\nHost: 10.0.0.2\r\nAccept: */*\r\n"));
  RT_CHECK_EQ(std::string(answerer.reason()), std::string("does not speak this protocol"));
}

// Nothing can be changed on the way, a version or a lane least of all.
RT_TEST(every_flipped_bit_is_found) {
  HelloCaller first = Caller();
  HelloAnswerer second = Answerer();
  const std::vector<Part> said = Talk(first, second);
  RT_REQUIRE_EQ(said.size(), size_t{4});
  for (size_t number = 0; number < said.size(); ++number)
    for (size_t byte = 0; byte < said[number].bytes.size(); ++byte)
      for (int bit : {0, 7}) {
        HelloCaller caller = Caller();
        HelloAnswerer answerer = Answerer();
        size_t part_number = 0;
        Talk(caller, answerer, 64, [&](Part* part) {
          if (part_number++ == number) part->bytes[byte] = static_cast<char>(part->bytes[byte] ^ (1 << bit));
        });
        RT_CHECK(caller.state() != Hello::State::kProven);
        RT_CHECK(answerer.state() != Hello::State::kProven || number == 3);
      }
}

// A stranger who has listened says it all again.
RT_TEST(what_was_said_before_proves_nothing) {
  HelloCaller first = Caller();
  HelloAnswerer second = Answerer(2);
  const std::vector<Part> said = Talk(first, second);
  HelloAnswerer answerer = Answerer(9);
  for (const Part& part : said)
    if (part.to_answerer) Give(answerer, part.bytes);
  RT_CHECK(answerer.state() == Hello::State::kRefused);
  HelloCaller caller = Caller(9);
  for (const Part& part : said)
    if (!part.to_answerer) Give(caller, part.bytes);
  RT_CHECK(caller.state() == Hello::State::kRefused);
}

// A stranger gives each end what the same rank says elsewhere: its own words, or those of another conversation.
RT_TEST(reflected_words_prove_nothing) {
  HelloCaller caller = Caller();
  const std::string greeting = caller.Say();
  Give(caller, greeting.substr(8, 16));  // its own nonce as the challenge
  const std::string proof = caller.Say();
  RT_CHECK_EQ(proof.size(), size_t{32});
  Give(caller, proof);
  RT_CHECK(caller.state() == Hello::State::kRefused);

  // Rank 2 calls rank 1 as rank 1 calls rank 2: the stranger swaps their words.
  HelloCaller there = Caller(5, {2, 1, kClaim.epoch, 3});
  HelloAnswerer answerer = Answerer();
  there.Say();
  HelloCaller imitated = Caller();
  Give(answerer, imitated.Say());
  Give(there, answerer.Say());
  Give(answerer, there.Say());
  RT_CHECK(answerer.state() == Hello::State::kRefused);
}

RT_TEST(of_strangers_the_first_is_told_at_once_and_the_others_once_a_minute) {
  Strangers strangers;
  RT_CHECK_EQ(strangers.due(), kNever);
  RT_CHECK_EQ(strangers.Line(1000 * kSecond, 3), std::string());
  strangers.TurnedAway("10.0.0.9:1", "left");
  RT_CHECK(strangers.due() <= 1000 * kSecond);
  RT_CHECK_EQ(strangers.Line(1000 * kSecond, 3),
              std::string("rank 3: connections must be of this job, but 1 turned away were not, the last from "
                          "10.0.0.9:1, which left."));
  RT_CHECK_EQ(strangers.due(), kNever);
  for (int second = 1; second < 60; ++second) {
    strangers.TurnedAway("10.0.0.9:" + std::to_string(second), "knocked");
    RT_CHECK_EQ(strangers.Line((1000 + second) * kSecond, 3), std::string());
  }
  RT_CHECK_EQ(strangers.due(), 1060 * kSecond);  // nobody need come for it
  RT_CHECK(strangers.Line(1060 * kSecond, 3)
               .find("but 59 turned away were not, the last from 10.0.0.9:59, which "
                     "knocked.") != std::string::npos);
  strangers.TurnedAway("10.0.0.9:7", "left");
  RT_CHECK_EQ(strangers.Line(1061 * kSecond, 3), std::string());
  RT_CHECK(strangers.Line(1062 * kSecond, 3, true).find("but 1 turned away") != std::string::npos);  // the end
  RT_CHECK_EQ(strangers.Line(1200 * kSecond, 3, true), std::string());
}

RT_TEST(a_part_that_is_cut_off_leaves_the_hello_unproven) {
  HelloCaller first = Caller();
  HelloAnswerer second = Answerer();
  const std::vector<Part> said = Talk(first, second);
  std::string to_answerer;
  for (const Part& part : said)
    if (part.to_answerer) to_answerer += part.bytes;
  for (size_t end = 0; end < to_answerer.size(); ++end) {
    HelloAnswerer answerer = Answerer();
    for (size_t byte = 0; byte < end; ++byte) Give(answerer, to_answerer.substr(byte, 1));
    RT_CHECK(answerer.state() == Hello::State::kTalking);
    RT_CHECK(answerer.wanted() > 0);
  }
}
