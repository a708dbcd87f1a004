// What travels after the hello, without a socket: sealed records, frames cut and joined, and the messages of two ranks
// over lanes that carry any number of bytes at a time.
#include <cstring>
#include <deque>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "check.h"
#include "transport/tcp/piece_stream.h"

using namespace ringtrain;

namespace {

constexpr uint64_t kEpoch = 77;

HmacKey Key(char byte) { return {&byte, 1}; }

std::string Content(size_t bytes, uint32_t seed) {
  std::string content(bytes, '\0');
  for (char& byte : content) {
    seed = seed * 1664525u + 1013904223u;
    byte = static_cast<char>(seed >> 24);
  }
  return content;
}

std::string Sealed(RecordSealer* sealer, const std::string& payload, RecordType type = RecordType::kFrame) {
  RecordHeader header;
  header.type = type;
  header.length = header.total = static_cast<uint32_t>(payload.size());
  std::string bytes;
  sealer->Seal(header, payload.data(), &bytes);
  return bytes;
}

// Records that an opener makes of bytes that come `step` at a time.
std::vector<std::string> Opened(RecordOpener* opener, const std::string& bytes, size_t step) {
  std::vector<std::string> payloads;
  for (size_t begin = 0; begin < bytes.size(); begin += step) {
    opener->Feed(bytes.data() + begin, std::min(step, bytes.size() - begin));
    RecordHeader header;
    std::string payload;
    while (opener->Next(&header, &payload)) payloads.push_back(payload);
  }
  return payloads;
}

// Both ranks of a pair, and lanes between them.
class Pair {
 public:
  explicit Pair(size_t lanes, unsigned seed = 1) : random_(seed) {
    for (int from : {0, 1})
      for (size_t lane = 0; lane < lanes; ++lane)
        lanes_.push_back({PieceWriter(&ends[from]), PieceReader(&ends[1 - from]), 1 - from});
  }

  Message* Send(int from, uint32_t tag, const std::string& content) {
    Message* message = Add(tag, content);
    ends[from].StartSend(message);
    return message;
  }
  Message* Receive(int at, uint32_t tag, size_t bytes) {
    Message* message = Add(tag, std::string(bytes, '\0'));
    message->receives = true;
    ends[at].StartReceive(message);
    return message;
  }
  std::string TextOf(const Message* message) const { return {message->data, message->bytes}; }
  static bool Complete(const Message* message) { return message->state == Message::kComplete; }

  // Moves what can be moved, at most `step` bytes at a time, until nothing moves any more.
  void Settle(size_t step) {
    for (bool moved = true; moved && fault == nullptr;) {
      moved = false;
      for (int from : {0, 1})
        while (TalkOnce(from)) moved = true;
      for (Lane& lane : lanes_) moved |= Move(&lane, step);
    }
  }
  // Only what rank `from` says on its control lane, and no piece.
  void Talk(int from) {
    while (TalkOnce(from)) continue;
  }

  // The next of them arrives; false if there was none.
  bool TalkOnce(int from) {
    RecordHeader header;
    if (!ends[from].NextControl(&header)) return false;
    Fault(ends[1 - from].HearControl(header));
    return true;
  }
  size_t lane_count() const { return lanes_.size(); }
  bool MoveLane(size_t lane, size_t step) { return Move(&lanes_[lane], step); }

  Exchange ends[2] = {Exchange(kEpoch), Exchange(kEpoch)};
  const char* fault = nullptr;

 private:
  struct Lane {
    PieceWriter writer;
    PieceReader reader;
    int to;
  };

  Message* Add(uint32_t tag, const std::string& content) {
    messages_.push_back(std::make_unique<Message>());
    memory_.push_back(std::make_unique<std::string>(content));
    Message* message = messages_.back().get();
    message->data = &(*memory_.back())[0];
    message->bytes = static_cast<uint32_t>(content.size());
    message->tag = tag;
    return message;
  }

  void Fault(const char* found) {
    if (fault == nullptr) fault = found;
  }

  bool Move(Lane* lane, size_t step) {
    iovec from[PieceWriter::kMostSpans], to[PieceReader::kMostSpans];
    const int sources = lane->writer.Gather(300000, from);
    if (sources == 0) return false;
    const int targets = lane->reader.Room(to);
    const size_t bytes = 1 + random_() % step;
    size_t moved = 0;
    for (int source = 0, target = 0; moved < bytes && source < sources && target < targets;) {
      const size_t chunk = std::min({bytes - moved, from[source].iov_len, to[target].iov_len});
      std::memcpy(to[target].iov_base, from[source].iov_base, chunk);
      for (iovec* span : {&from[source], &to[target]}) {
        span->iov_base = static_cast<char*>(span->iov_base) + chunk;
        span->iov_len -= chunk;
      }
      moved += chunk;
      source += from[source].iov_len == 0 ? 1 : 0;
      target += to[target].iov_len == 0 ? 1 : 0;
    }
    lane->writer.Wrote(moved);
    Fault(lane->reader.Took(moved));
    return true;
  }

  std::mt19937 random_;
  std::vector<std::unique_ptr<Message>> messages_;
  std::vector<std::unique_ptr<std::string>> memory_;
  std::vector<Lane> lanes_;
};

RecordHeader PieceHeader(uint32_t tag, uint32_t sequence, uint32_t length, uint32_t offset, uint32_t total) {
  RecordHeader header;
  header.type = RecordType::kPiece;
  header.epoch = kEpoch;
  header.tag = tag;
  header.sequence = sequence;
  header.length = length;
  header.offset = offset;
  header.total = total;
  return header;
}

RecordHeader OnCredit(RecordHeader header) {
  header.type = RecordType::kOnCredit;
  return header;
}

}  // namespace

// ---- sealed records ----

RT_TEST(records_arrive_as_they_were_sealed_however_they_are_cut) {
  std::vector<std::string> sent;
  for (size_t bytes : {0, 1, 31, 32, 33, 1000, 65536}) sent.push_back(Content(bytes, static_cast<uint32_t>(bytes)));
  for (size_t step : {1, 5, 48, 70000}) {
    RecordSealer sealer(Key('k'));
    RecordOpener opener(Key('k'));
    std::string bytes;
    for (const std::string& payload : sent) bytes += Sealed(&sealer, payload);
    RT_CHECK(Opened(&opener, bytes, step) == sent);
    RT_CHECK(opener.fault() == nullptr);
  }
}

RT_TEST(a_flipped_bit_anywhere_in_a_record_is_found) {
  RecordSealer sealer(Key('k'));
  const std::string bytes = Sealed(&sealer, "tensor");
  for (size_t byte = 0; byte < bytes.size(); ++byte)
    for (int bit : {0, 3, 7}) {
      std::string changed = bytes;
      changed[byte] = static_cast<char>(changed[byte] ^ (1 << bit));
      RecordOpener opener(Key('k'));
      changed += std::string(70000, 'x');  // it may have become longer
      RT_CHECK(Opened(&opener, changed, 1000).empty());
      RT_CHECK(opener.fault() != nullptr);
    }
}

RT_TEST(a_record_that_is_repeated_left_out_or_of_another_connection_is_found) {
  RecordSealer sealer(Key('k'));
  const std::string first = Sealed(&sealer, "first"), second = Sealed(&sealer, "second");
  const std::pair<std::string, size_t> streams[] = {{first + first, 1}, {second, 0}, {first + second + second, 2}};
  for (const auto& stream : streams) {
    RecordOpener opener(Key('k'));
    RT_CHECK_EQ(Opened(&opener, stream.first, 9).size(), stream.second);
    RT_CHECK_EQ(std::string(opener.fault()), std::string("has a wrong seal"));
  }
  RecordOpener other(Key('o'));
  RT_CHECK(Opened(&other, first, 9).empty() && other.fault() != nullptr);
}

RT_TEST(a_header_that_announces_too_much_is_refused_before_its_payload) {
  RecordHeader header;
  header.length = RecordOpener::kMostPayload + 1;
  char bytes[RecordHeader::kBytes];
  header.Encode(bytes);
  RecordOpener opener(Key('k'));
  RT_CHECK(Opened(&opener, std::string(bytes, sizeof bytes), 32).empty());
  RT_CHECK_EQ(std::string(opener.fault()), std::string("is too long"));
}

RT_TEST(frames_are_cut_and_joined) {
  for (size_t size : {size_t{0}, size_t{1}, size_t{65535}, size_t{65536}, size_t{65537}, size_t{300000}}) {
    const std::string frame = Content(size, 5);
    FrameJoiner joiner;
    std::string joined;
    bool whole = false;
    CutFrame(frame, kEpoch, [&](const RecordHeader& header, const char* payload) {
      RT_CHECK(!whole);
      RT_CHECK(joiner.Add(header, std::string(payload, header.length), &joined, &whole));
    });
    RT_CHECK(whole && joined == frame);
  }
  FrameJoiner joiner;
  std::string joined;
  bool whole = false;
  RT_CHECK(!joiner.Add(PieceHeader(0, 0, 4, 4, 8), "part", &joined, &whole));  // the first part is missing
  RT_CHECK(joiner.Add(PieceHeader(0, 0, 4, 0, 8), "part", &joined, &whole) && !whole);
  RT_CHECK(!joiner.Add(PieceHeader(0, 0, 4, 4, 9), "part", &joined, &whole));  // of another frame
  RT_CHECK(!joiner.Add(PieceHeader(0, 0, 4, 0, 8), "part", &joined, &whole));  // once more
  RT_CHECK(!joiner.Add(PieceHeader(0, 0, 8, 4, 8), "too much", &joined, &whole));
  FrameJoiner fresh;
  RT_CHECK(!fresh.Add(PieceHeader(0, 0, 4, 0, FrameJoiner::kMostBytes + 1), "part", &joined, &whole));
}

// ---- messages ----

RT_TEST(messages_of_all_sizes_match_by_tag_and_order) {
  const std::vector<size_t> sizes = {0, 1, 31, 4064, 4096, 65536, 65537, 262144, 262145, 1000000};
  for (size_t lanes : {1, 3})
    for (size_t step : {1, 977, 5000, 1 << 20}) {
      if (step == 1 && lanes > 1) continue;
      Pair pair(lanes, static_cast<unsigned>(step));
      std::vector<std::pair<Message*, std::string>> received;
      const size_t count = step == 1 ? 7 : sizes.size();
      for (int late : {0, 1})  // receives come first, and last
        for (int from : {0, 1}) {
          std::vector<Message*> sends;
          for (int order : {late, 1 - late})
            for (size_t number = 0; number < count; ++number) {
              const auto seed = static_cast<uint32_t>(number * 10) + static_cast<uint32_t>(from * 2 + late);
              const auto tag = static_cast<uint32_t>(number % 3);
              if (order == 1)
                sends.push_back(pair.Send(from, tag, Content(sizes[number], seed)));
              else
                received.emplace_back(pair.Receive(1 - from, tag, sizes[number]), Content(sizes[number], seed));
              if (order == 1 && late == 1) pair.Settle(step);
            }
          pair.Settle(step);
          for (Message* send : sends) RT_CHECK(Pair::Complete(send));
        }
      RT_CHECK(pair.fault == nullptr);
      for (const auto& each : received) {
        RT_CHECK(Pair::Complete(each.first));
        RT_CHECK(pair.TextOf(each.first) == each.second);
      }
      RT_CHECK(!pair.ends[0].bulky() && !pair.ends[1].bulky());
    }
}

namespace {

// What two ranks send each other, and in which order each of them says so: sends as they are drawn, the receives of a
// tag in the order of its sends, but the tags in any order.
struct Traffic {
  struct Entry {
    uint32_t tag, seed;
    size_t bytes;
  };

  explicit Traffic(std::mt19937* random) {
    const size_t sizes[] = {0, 1, 31, 4064, 50000, 65536, 65537, 262145, 400000};
    for (int from : {0, 1}) {
      std::map<uint32_t, std::deque<Entry>> by_tag;
      for (uint32_t number = 0; number < 24; ++number) {
        const uint32_t tag = static_cast<uint32_t>((*random)() % 5);
        sends[from].push_back({tag, number * 2 + static_cast<uint32_t>(from), sizes[(*random)() % std::size(sizes)]});
        by_tag[tag].push_back(sends[from].back());
      }
      while (!by_tag.empty()) {
        const auto tag = std::next(by_tag.begin(), static_cast<long>((*random)() % by_tag.size()));
        receives[1 - from].push_back(tag->second.front());
        tag->second.pop_front();
        if (tag->second.empty()) by_tag.erase(tag);
      }
    }
  }
  bool all_said() const { return sends[0].empty() && sends[1].empty() && receives[0].empty() && receives[1].empty(); }

  std::deque<Entry> sends[2], receives[2];
};

}  // namespace

// Simulated: lanes that stand early or late, records and pieces that overtake each other, ranks of which one is far
// ahead, writes and reads of any length.
RT_TEST(messages_arrive_whatever_moves_first) {
  for (unsigned seed = 0; seed < 100; ++seed) {
    std::mt19937 random(seed);
    Pair pair(1 + random() % 3, seed);
    for (Exchange& end : pair.ends) {
      if (random() % 2 == 0) end.CutInto(static_cast<uint32_t>(1 + random() % 30000));
      if (random() % 2 == 0) end.NoteFar();
    }
    Traffic traffic(&random);
    std::vector<std::pair<Message*, Traffic::Entry>> sent, received;
    std::vector<bool> stands(pair.lane_count(), false);
    const size_t eager = 1 + random() % 12;  // how much sooner ranks speak than bytes move
    const size_t step = size_t{1} << (4 + random() % 17);
    while (!traffic.all_said() && pair.fault == nullptr) {
      const size_t choice = random() % (4 * eager + 2 + pair.lane_count());
      const int rank = static_cast<int>(choice % 2);
      if (choice < 4 * eager) {
        const bool sends = choice % 4 < 2;
        std::deque<Traffic::Entry>& queue = sends ? traffic.sends[rank] : traffic.receives[rank];
        if (queue.empty()) continue;
        const Traffic::Entry entry = queue.front();
        queue.pop_front();
        if (sends)
          sent.emplace_back(pair.Send(rank, entry.tag, Content(entry.bytes, entry.seed)), entry);
        else
          received.emplace_back(pair.Receive(rank, entry.tag, entry.bytes), entry);
      } else if (choice < 4 * eager + 2) {
        pair.TalkOnce(rank);
      } else {
        const size_t lane = choice - 4 * eager - 2;
        stands[lane] = stands[lane] || random() % 8 == 0;
        if (stands[lane]) pair.MoveLane(lane, step);
      }
    }
    pair.Settle(size_t{1} << 20);
    RT_REQUIRE(pair.fault == nullptr);
    for (const auto& each : sent) RT_REQUIRE(Pair::Complete(each.first));
    for (const auto& each : received) {
      RT_REQUIRE(Pair::Complete(each.first));
      RT_REQUIRE(pair.TextOf(each.first) == Content(each.second.bytes, each.second.seed));
    }
    RT_REQUIRE(!pair.ends[0].bulky() && !pair.ends[1].bulky());
  }
}

// What a lane without credit dies of: the receives are posted in the other order, each after the one before is done.
RT_TEST(a_message_that_nobody_has_asked_for_stops_no_other) {
  Pair pair(1);
  std::vector<Message*> sends;
  for (uint32_t tag = 0; tag < 40; ++tag)
    sends.push_back(pair.Send(0, tag, Content(tag % 2 == 0 ? 60000 : 200000, tag)));
  pair.Settle(100000);
  for (uint32_t tag = 40; tag-- > 0;) {
    Message* receive = pair.Receive(1, tag, tag % 2 == 0 ? 60000 : 200000);
    pair.Settle(100000);
    RT_CHECK(Pair::Complete(receive));
    RT_CHECK(pair.TextOf(receive) == Content(receive->bytes, tag));
  }
  for (Message* send : sends) RT_CHECK(Pair::Complete(send));
  RT_CHECK(pair.fault == nullptr);
}

RT_TEST(credit_bounds_what_waits_and_comes_back) {
  Pair pair(1);
  std::vector<Message*> sends;
  for (uint32_t number = 0; number < 100; ++number) sends.push_back(pair.Send(0, 1, Content(50000, number)));
  pair.Settle(1 << 20);
  size_t left = 0;
  for (Message* send : sends) left += Pair::Complete(send) ? 1 : 0;
  RT_CHECK(left > 10 && left * 50000 <= Exchange::kNearCredit);
  for (uint32_t round = 0; round < 20; ++round)
    for (uint32_t number = 0; number < 100; ++number) {
      Message* receive = pair.Receive(1, 1, 50000);
      pair.Settle(1 << 20);
      RT_CHECK(Pair::Complete(receive));
      if (round == 0) RT_CHECK(pair.TextOf(receive) == Content(50000, number));
      sends.push_back(pair.Send(0, 1, Content(50000, number)));
    }
  RT_CHECK(pair.fault == nullptr);
}

// Small ones cost something too: without end they would fill the memory of a rank that has not posted yet.
RT_TEST(empty_messages_are_bounded_as_well) {
  Pair pair(1);
  std::vector<Message*> sends;
  for (int number = 0; number < 20000; ++number) sends.push_back(pair.Send(0, 1, ""));
  pair.Settle(1 << 20);
  RT_CHECK(Pair::Complete(sends.front()) && !Pair::Complete(sends.back()));
  for (int number = 0; number < 20000; ++number) pair.Receive(1, 1, 0);
  pair.Settle(1 << 20);
  RT_CHECK(Pair::Complete(sends.back()));
}

RT_TEST(large_messages_wait_for_their_receive_and_use_no_other_memory) {
  Pair pair(1);
  Message* send = pair.Send(0, 9, Content(1 << 20, 3));
  pair.Settle(1 << 20);
  RT_CHECK_EQ(send->moved, 0u);
  RT_CHECK(pair.ends[0].bulky());
  Message* receive = pair.Receive(1, 9, 1 << 20);
  pair.Settle(1 << 20);
  RT_CHECK(Pair::Complete(send) && Pair::Complete(receive));
}

RT_TEST(on_a_long_line_large_messages_leave_before_their_receive_up_to_their_credit) {
  Pair pair(2);
  pair.ends[0].NoteFar();
  pair.ends[0].CutInto(30000);
  std::vector<Message*> sends;
  for (uint32_t number = 0; number < 12; ++number) sends.push_back(pair.Send(0, number % 2, Content(1 << 20, number)));
  pair.Settle(1 << 20);
  size_t left = 0;
  for (Message* send : sends) left += Pair::Complete(send) ? 1 : 0;
  RT_CHECK_EQ(left, size_t{7});  // and what they cost beside their bytes
  for (uint32_t round = 0; round < 2; ++round) {
    for (uint32_t number = 0; number < 12; ++number) {
      Message* receive = pair.Receive(1, number % 2, 1 << 20);
      if (round == 1) pair.Send(0, number % 2, Content(1 << 20, number));
      pair.Settle(1 << 20);
      RT_CHECK(Pair::Complete(receive));
      RT_CHECK(pair.TextOf(receive) == Content(1 << 20, number));
    }
  }
  RT_CHECK(pair.fault == nullptr);
  RT_CHECK(!pair.ends[0].bulky() && !pair.ends[1].bulky());
}

// Whoever waits for a size that does not come gives its credit back all the same.
RT_TEST(messages_of_the_wrong_size_use_no_credit_up) {
  Pair pair(1);
  for (uint32_t number = 0; number < 100; ++number) {
    Message* receive = pair.Receive(1, 4, 100);
    Message* send = pair.Send(0, 4, Content(60000, number));
    pair.Settle(5000);
    RT_CHECK_EQ(receive->state.load(), uint32_t{Message::kWrongSize});
    RT_CHECK(Pair::Complete(send));
  }
  RT_CHECK(pair.fault == nullptr);
}

RT_TEST(a_size_that_differs_is_told_to_the_receiver) {
  const std::pair<size_t, size_t> sizes[] = {{100, 50},     {100, 0},         {100000, 50},
                                             {100, 100000}, {300000, 900000}, {900000, 300000}};
  for (const auto& size : sizes)
    for (bool receive_first : {false, true}) {
      Pair pair(2);
      Message* receive = receive_first ? pair.Receive(1, 4, size.second) : nullptr;
      if (receive_first) pair.Settle(5000);
      pair.Send(0, 4, Content(size.first, 1));
      pair.Settle(5000);
      if (!receive_first) receive = pair.Receive(1, 4, size.second);
      pair.Settle(5000);
      RT_CHECK_EQ(receive->state.load(), uint32_t{Message::kWrongSize});
      RT_CHECK_EQ(receive->found, static_cast<uint32_t>(size.first));
      RT_CHECK(pair.TextOf(receive) == std::string(size.second, '\0'));
      RT_CHECK(pair.fault == nullptr);
    }
}

RT_TEST(abandoned_messages_are_touched_no_more) {
  Pair pair(1);
  Message* receive = pair.Receive(1, 4, 300000);
  pair.Talk(1);
  Message* send = pair.Send(0, 4, Content(300000, 1));
  for (Exchange& end : pair.ends) end.Abandon();
  pair.Settle(1000);
  RT_CHECK(!Pair::Complete(send) && !Pair::Complete(receive));
  RT_CHECK(!pair.ends[0].bulky() && !pair.ends[1].bulky());
}

// ---- a peer that does not keep to it ----

RT_TEST(pieces_that_nobody_asked_for_are_faults) {
  struct Fault {
    std::vector<RecordHeader> headers;  // all but the last are in order
    const char* text;
  };
  RecordHeader other_epoch = PieceHeader(1, 0, 4, 0, 4);
  ++other_epoch.epoch;
  const std::vector<Fault> faults = {
      {{PieceHeader(1, 0, 70000, 0, 70000)}, "belongs to a message that nobody asked for"},
      {{PieceHeader(1, 0, 10, 0, 20)}, "belongs to a message that nobody asked for"},
      {{PieceHeader(1, 0, 30, 10, 20)}, "cannot be read"},
      {{PieceHeader(1, 0, UINT32_MAX, UINT32_MAX, 20)}, "cannot be read"},
      {{PieceHeader(1, 0, 0, 0, 20)}, "cannot be read"},
      {{other_epoch}, "cannot be read"},
      {{PieceHeader(5, 0, 200000, 0, 200000), PieceHeader(5, 0, 10, 0, 200000)}, "belongs to a message that has ended"},
      {{PieceHeader(5, 0, 100000, 0, 200000), PieceHeader(5, 0, 100001, 0, 200000)}, "repeats what has come"},
      {{PieceHeader(5, 0, 100000, 0, 200000), PieceHeader(5, 0, 100000, 100000, 200001)}, "contradicts an earlier one"},
      {{OnCredit(PieceHeader(1, 0, 10, 0, 10)), OnCredit(PieceHeader(1, 0, 10, 0, 10))}, "repeats what has come"},
      {{OnCredit(PieceHeader(1, 0, 0, 0, 0)), OnCredit(PieceHeader(1, 0, 0, 0, 0))}, "repeats what has come"},
      {{OnCredit(PieceHeader(1, 0, 10, 0, 20)), PieceHeader(1, 0, 10, 10, 20)}, "contradicts an earlier one"},
      {{PieceHeader(5, 0, 100000, 0, 200000), OnCredit(PieceHeader(5, 0, 1, 100000, 200000))},
       "contradicts an earlier one"},
      {{OnCredit(PieceHeader(1, 0, 10, 0, 9 << 20))}, "goes beyond its credit"},
      {{OnCredit(PieceHeader(5, 0, 200000, 0, 200000)), OnCredit(PieceHeader(5, 0, 10, 0, 200000))},
       "belongs to a message that has ended"},
  };
  for (const Fault& fault : faults) {
    Exchange exchange(kEpoch);
    std::string memory(200000, '\0');
    Message receive;
    receive.data = &memory[0];
    receive.bytes = 200000;
    receive.tag = 5;
    exchange.StartReceive(&receive);
    const char* found = nullptr;
    for (const RecordHeader& header : fault.headers) {
      RT_CHECK(found == nullptr);
      char* into = nullptr;
      found = exchange.Place(header, &into);
      if (found == nullptr) exchange.PieceArrived(header);
    }
    RT_CHECK_EQ(std::string(found != nullptr ? found : "no fault"), std::string(fault.text));
  }
  Exchange exchange(kEpoch);
  const char* found = nullptr;
  uint32_t sequence = 0;
  for (char* into = nullptr; found == nullptr; ++sequence) {
    found = exchange.Place(OnCredit(PieceHeader(1, sequence, 60000, 0, 60000)), &into);
    if (found == nullptr) exchange.PieceArrived(OnCredit(PieceHeader(1, sequence, 60000, 0, 60000)));
  }
  RT_CHECK_EQ(std::string(found), std::string("goes beyond its credit"));
  RT_CHECK(sequence * 60000 <= Exchange::kCredit + 60000);
}

RT_TEST(control_records_that_make_no_sense_are_faults) {
  Exchange exchange(kEpoch);
  RecordHeader header = PieceHeader(1, 0, 0, 0, 1);
  RT_CHECK(exchange.HearControl(header) != nullptr);  // no control record
  header.type = RecordType::kReturned;
  RT_CHECK_EQ(std::string(exchange.HearControl(header)), std::string("returns more than was lent"));
  header.type = RecordType::kAsk;
  ++header.epoch;
  RT_CHECK(exchange.HearControl(header) != nullptr);
}
