#include "judge.h"

#include <algorithm>

#include "faults.h"
#include "random.h"

namespace ringtrain {
namespace simulation {
namespace {

constexpr int kMaxBatches =
    2;  // of a set under way at its coordinator that decides the next: negotiator.cc promises it

std::string RankText(int rank) { return "rank " + std::to_string(rank); }

bool Exchanges(const Response& response) {
  return ringtrain::Find(response.request.operation)->layout == Layout::kExchange;
}

// What is the same for all members.
Response Common(Response response) {
  if (!Exchanges(response)) return response;
  response.request.splits.clear();
  response.request.tensors[0].shape[0] = 0;
  response.rows = {response.rows.back()};
  return response;
}

uint64_t Digest(const effect::Execute& execute) {
  uint64_t digest = 1;
  for (const Response& response : execute.responses) {
    Encoder encoder;
    Encode(Common(response), &encoder);
    for (char byte : encoder.Take()) digest = digest * 0x100000001b3 ^ static_cast<uint8_t>(byte);
    digest = Mix(digest);
  }
  for (bool joined : execute.joined) digest = digest * 3 + joined;
  return digest;
}

// The rule of fusion, written down once more: what is the same for a whole batch on the wire.
bool MayShareABatch(const Response& one, const Response& other) {
  const Request &a = one.request, &b = other.request;
  Request like_a = b;
  like_a.name = a.name;
  like_a.cacheable = a.cacheable;
  like_a.tensors = a.tensors;
  like_a.weight = a.weight;
  if (!ringtrain::Find(a.operation)->fuses ||
      (ringtrain::Find(a.operation)->reduces && a.tensors[0].dtype != b.tensors[0].dtype))
    return false;
  return like_a == a && one.weights == other.weights;
}

bool StartsWith(const std::string& text, const std::string& start) { return text.compare(0, start.size(), start) == 0; }

// What is wrong with a failure, or nothing.
std::string Compare(const Verdict& expected, const Status& status) {
  if (expected.runs) return "it must run, but failed: " + status.message();
  if (status.code() != expected.code)
    return std::string("its failure must be ") + Text(expected.code) + ", but is " + Text(status.code()) + ": " +
           status.message();
  const auto& starts = expected.any_of;
  if (!starts.empty() && std::none_of(starts.begin(), starts.end(),
                                      [&](const std::string& start) { return StartsWith(status.message(), start); }))
    return "the text must begin with '" + starts[0] + "', but is '" + status.message() + "'";
  for (const std::string& part : expected.all_of)
    if (status.message().find(part) == std::string::npos)
      return "the text must hold '" + part + "', but is '" + status.message() + "'";
  return "";
}

}  // namespace

Judge::Judge(const Plan& plan) : plan_(plan), never_evicts_(plan.options.cache_capacity >= 1024) {}

void Judge::Violate(const std::string& text) {
  if (violation_.empty()) violation_ = text;
}

const Judge::Member* Judge::Find(int rank, int set) const {
  auto found = members_.find({rank, set});
  return found == members_.end() ? nullptr : &found->second;
}

bool Judge::InFlight(int rank, int set, const std::string& name) const {
  const Member* member = Find(rank, set);
  return member != nullptr && member->in_flight.count(name) > 0;
}

bool Judge::InFlight(int rank, int set) const {
  const Member* member = Find(rank, set);
  return member != nullptr && !member->in_flight.empty();
}

bool Judge::Idle(int rank) const {
  for (auto member = members_.lower_bound({rank, 0}); member != members_.end() && member->first.first == rank; ++member)
    if (!member->second.in_flight.empty()) return false;
  return true;
}

const Turn& Judge::TurnOf(int rank, int set, const std::string& name) const {
  return *members_.at({rank, set}).in_flight.at(name).turn;
}

void Judge::Submitted(int rank, int set, const Turn& turn, const Request& request) {
  Member& member = members_[{rank, set}];
  auto agreed = member.agreed.find(turn.name);
  const bool hit = never_evicts_ && agreed != member.agreed.end() && agreed->second == request;
  ++(hit ? member.expected_hits : member.expected_misses);
  member.in_flight[turn.name] = {&turn, request};
}

void Judge::Executed(int rank, int set, const effect::Execute& execute, const std::vector<int>& members) {
  Member& member = members_[{rank, set}];
  const int place = static_cast<int>(std::lower_bound(members.begin(), members.end(), rank) - members.begin());
  if (execute.responses.empty() || execute.joined.size() != members.size())
    return Violate(RankText(rank) + " was told to run a batch without operations or members");
  Batch* const batch = BatchOf(set, execute, &member);
  if (batch == nullptr) return Violate(RankText(rank) + " is told to do what it has not asked for");
  if (batch->turns.empty()) CheckNewBatch(set, execute, members, batch);
  if (!violation_.empty()) return;
  if (Digest(execute) != batch->digest)
    return Violate(RankText(rank) + " runs another batch with " + execute.responses[0].request.Subject() + " in set " +
                   std::to_string(set) + " than others");
  for (size_t i = 0; i < execute.responses.size(); ++i) {
    const Response& response = execute.responses[i];
    Remember(response, execute, &member);
    if (execute.joined[place]) continue;
    auto submission = member.in_flight.find(response.request.name);
    if (submission == member.in_flight.end() || submission->second.turn != batch->turns[i].first)
      return Violate(RankText(rank) + " runs " + response.request.Subject() + " without having submitted that turn");
    if (std::exchange(submission->second.executed, true))
      return Violate(RankText(rank) + " is told to run " + response.request.Subject() + " twice");
    if (Exchanges(response))
      CheckExchange(rank, static_cast<size_t>(place), response, batch->exchanged.at(response.request.name));
  }
  if (place == 0 && ++member.under_way > kMaxBatches && !execute.scheduled)
    Violate(std::to_string(member.under_way) + " batches of set " + std::to_string(set) + " are under way");
}

std::string Judge::ContributionOf(int rank, int set, const std::vector<Response>& responses) const {
  std::string text;
  for (const Response& response : responses)
    text += std::to_string(TurnOf(rank, set, response.request.name).number) + " ";
  return text;
}

// Else one of the two would wait for what is not sent, or add what belongs to another step.
void Judge::WentAhead(int rank, int set, const effect::Execute& execute, const Ahead& ahead) {
  const std::string subject = execute.responses[0].request.Subject() + " in set " + std::to_string(set);
  if (ahead.came && ahead.contribution != ContributionOf(rank, set, execute.responses))
    Violate(RankText(rank) + " begins " + subject + " with a contribution of another turn");
  const auto [others, first] = ahead_.insert({{set, execute.schedule, execute.batch}, ahead});
  if (!first && (others->second.sent != ahead.came || others->second.came != ahead.sent))
    Violate(RankText(rank) + " begins " + subject + " with another view of what went ahead than its peer");
}

// By its place in the order of the set; but a removal by its turn, since a rank may have to hold it back.
Judge::Batch* Judge::BatchOf(int set, const effect::Execute& execute, Member* member) {
  const Request& first = execute.responses[0].request;
  if (first.operation == Operation::kRemoveProcessSet) {
    auto submission = member->in_flight.find(first.name);
    return submission == member->in_flight.end() ? nullptr : &removals_[submission->second.turn->number];
  }
  std::vector<Batch>& batches = batches_[set];
  const size_t index = member->batches++;
  if (index == batches.size()) batches.emplace_back();
  return &batches[index];
}

void Judge::CheckNewBatch(int set, const effect::Execute& execute, const std::vector<int>& members, Batch* batch) {
  batch->digest = Digest(execute);
  CheckFusion(execute);
  for (const Response& response : execute.responses) CheckContributions(set, response, execute.joined, members, batch);
}

void Judge::CheckFusion(const effect::Execute& execute) {
  size_t bytes = 0;
  for (const Response& response : execute.responses) {
    bytes += response.request.bytes();
    if (execute.responses.size() > 1 && !MayShareABatch(execute.responses[0], response))
      Violate("a batch fuses what cannot be fused: " + response.request.Subject());
  }
  if (execute.responses.size() > 1 && bytes > static_cast<size_t>(plan_.options.fusion_threshold_bytes))
    Violate("a batch is larger than the threshold");
}

// Every member that is not listed as joined must have submitted just this at this moment, and nobody who is listed.
void Judge::CheckContributions(int set, const Response& response, const std::vector<bool>& joined,
                               const std::vector<int>& members, Batch* batch) {
  const std::string& name = response.request.name;
  const Turn* turn = nullptr;
  for (size_t place = 0; place < members.size(); ++place) {
    if (joined[place]) continue;
    const int rank = members[place];
    const Member* member = Find(rank, set);
    auto submission = member == nullptr ? decltype(member->in_flight.find(name))() : member->in_flight.find(name);
    if (member == nullptr || submission == member->in_flight.end() || submission->second.executed)
      return Violate(response.request.Subject() + " runs, but " + RankText(rank) + " has not submitted it");
    if (turn == nullptr) turn = submission->second.turn;
    if (turn != submission->second.turn)
      return Violate(response.request.Subject() + " pairs turn " + std::to_string(turn->number) + " with turn " +
                     std::to_string(submission->second.turn->number) + " of " + RankText(rank));
    const Request& own = submission->second.request;
    Request theirs = response.RequestOf(static_cast<int>(place), static_cast<int>(members.size()));
    if (Exchanges(response)) {
      theirs.splits = own.splits;
      theirs.tensors[0].shape[0] = own.tensors[0].shape[0];
      std::vector<int64_t>& rows = batch->exchanged[name];
      rows.resize(members.size() * members.size(), 0);
      std::copy(own.splits.begin(), own.splits.end(), rows.begin() + static_cast<ptrdiff_t>(place * members.size()));
    }
    if (!(theirs == own))
      return Violate(response.request.Subject() + " runs otherwise than " + RankText(rank) + " has submitted it");
  }
  if (turn == nullptr) return Violate(response.request.Subject() + " runs though all have joined");
  const Verdict verdict = ExpectedVerdict(plan_, *turn);
  if (!verdict.runs) return Violate("turn " + std::to_string(turn->number) + " runs, but must fail");
  for (size_t place = 0; place < members.size(); ++place)
    if (joined[place] != (turn->parts.at(members[place]).act == Act::kAbsent))
      return Violate("turn " + std::to_string(turn->number) + " has " + RankText(members[place]) + " wrongly " +
                     (joined[place] ? "among" : "not among") + " the joined");
  if (warnings_[turn->number] != verdict.warnings && !plan_.fails())
    Violate("turn " + std::to_string(turn->number) + " was reported as stalled " +
            std::to_string(warnings_[turn->number]) + " times, expected " + std::to_string(verdict.warnings));
  batch->turns.emplace_back(turn, name);
}

// rows: [from * members + to]
void Judge::CheckExchange(int rank, size_t place, const Response& response, const std::vector<int64_t>& rows) {
  const size_t members = response.request.splits.size();
  bool right = response.rows.size() == members + 1 && rows.size() == members * members;
  for (size_t other = 0; right && other < members; ++other)
    right = response.request.splits[other] == rows[place * members + other] &&
            response.rows[other] == rows[other * members + place];
  if (!right)
    Violate(RankText(rank) + " exchanges other rows in " + response.request.Subject() + " than were submitted");
}

void Judge::Remember(const Response& response, const effect::Execute& execute, Member* member) {
  const bool whole = std::find(execute.joined.begin(), execute.joined.end(), true) == execute.joined.end();
  const bool data = ringtrain::Find(response.request.operation)->output != Output::kNone;
  if (whole && data && response.request.cacheable)
    member->agreed[response.request.name] = member->in_flight[response.request.name].request;
}

void Judge::Finished(int rank, int set, const effect::Execute& execute) {
  Member& member = members_[{rank, set}];
  for (const Response& response : execute.responses) Finish(rank, response.request.name, &member);
  if (member.under_way > 0) --member.under_way;
}

void Judge::Finish(int rank, const std::string& name, Member* member) {
  auto submission = member->in_flight.find(name);
  if (submission == member->in_flight.end() || !submission->second.executed) return;  // it has joined
  if (!done_.insert({rank, submission->second.turn->number}).second) Violate("a turn ends twice on " + RankText(rank));
  member->in_flight.erase(submission);
}

void Judge::Failed(int rank, int set, const std::string& name, const Status& status) {
  Member& member = members_[{rank, set}];
  auto submission = member.in_flight.find(name);
  if (submission == member.in_flight.end() || submission->second.executed)
    return Violate("'" + name + "' fails on " + RankText(rank) + ", which does not wait for it: " + status.message());
  const Turn& turn = *submission->second.turn;
  const std::string wrong = Compare(ExpectedVerdict(plan_, turn), status);
  if (!wrong.empty()) return Violate("turn " + std::to_string(turn.number) + " on " + RankText(rank) + ": " + wrong);
  if (status.code() != StatusCode::kClosed) CheckSameTold(rank, turn, status.message());
  done_.insert({rank, turn.number});
  member.in_flight.erase(submission);
}

void Judge::CheckSameTold(int rank, const Turn& turn, const std::string& text) {
  const std::string& first = failures_.emplace(turn.number, text).first->second;
  if (text != first)
    Violate("turn " + std::to_string(turn.number) + ": " + RankText(rank) + " is told '" + text + "', but another '" +
            first + "'");
}

void Judge::Warned(int rank, const std::string& text) {
  for (const Turn& turn : plan_.turns) {
    if (!turn.fenced || !StartsWith(text, SubjectIn(turn)) || text.find(": waiting ") == std::string::npos ||
        done_.count({rank, turn.number}) > 0)
      continue;
    bool waits = false;
    for (const auto& part : turn.parts) waits |= done_.count({part.first, turn.number}) == 0;
    if (!waits) continue;
    ++warnings_[turn.number];
    return;
  }
  if (!plan_.fails()) Violate(RankText(rank) + " reports a stall where nobody is late: " + text);
}

void Judge::Counted(int rank, int set, const effect::Count& count) {
  members_[{rank, set}].hits += count.hits;
  members_[{rank, set}].misses += count.misses;
}

void Judge::Sent(int rank, const Frame& frame, bool coordinates, bool to_coordinator) {
  const bool ready = frame.type == FrameType::kReady,
             decides = frame.type == FrameType::kVerdicts || frame.type == FrameType::kResend;
  if ((ready && (coordinates || !to_coordinator)) || (decides && !coordinates))
    return Violate(RankText(rank) + " sends what it has no business to send");
  if (ready && frame.ids.empty() && frame.requests.empty() && frame.refusals.empty() && frame.resent == 0)
    Violate(RankText(rank) + " sends an empty frame in set " + std::to_string(frame.process_set));
}

void Judge::Removed(int rank, int set) {
  if (InFlight(rank, set)) Violate(RankText(rank) + " removes set " + std::to_string(set) + " while it is used");
}

void Judge::Struck(const Fault& fault, Nanoseconds now) { struck_.emplace_back(fault, now); }

void Judge::Ended(int rank, Nanoseconds now, const std::string& cause) {
  ended_.insert(rank);
  CheckToldBefore(rank);
  std::string misfit = fitting_causes_.count(cause) > 0 ? "" : "nothing has happened";
  for (const auto& [fault, struck] : struck_)
    if (!misfit.empty()) misfit = Misfit(plan_, fault, struck, now, cause);
  fitting_causes_.insert(cause);
  if (!misfit.empty()) return Violate(RankText(rank) + " is told '" + cause + "', but " + misfit);
  const std::string& first = causes_.emplace(plan_.host_of.at(rank), cause).first->second;
  if (first != cause)
    Violate(RankText(rank) + " is told '" + cause + "', but another rank of its host '" + first + "'");
}

// A mismatch that others have been told of was decided, and sent to this rank too, before the world ended.
void Judge::CheckToldBefore(int rank) {
  const auto raised = [&](const auto& each) { return each.first.ranks[0] == rank; };
  if (!EndsByErrorsAlone(plan_) || std::any_of(struck_.begin(), struck_.end(), raised)) return;
  for (auto member = members_.lower_bound({rank, 0}); member != members_.end() && member->first.first == rank; ++member)
    for (const auto& [name, submission] : member->second.in_flight)
      if (failures_.count(submission.turn->number) > 0 &&
          ExpectedVerdict(plan_, *submission.turn).code == StatusCode::kMismatch)
        Violate(RankText(rank) + " hears of the world's end, but not that turn " +
                std::to_string(submission.turn->number) + " ('" + name + "') had failed before, as others were told");
}

void Judge::Closed(int rank) {
  for (auto member = members_.lower_bound({rank, 0}); member != members_.end() && member->first.first == rank; ++member)
    member->second.in_flight.clear();
}

void Judge::End() {
  for (const auto& [key, member] : members_) {
    if (ended_.count(key.first) > 0) continue;
    for (const auto& [name, submission] : member.in_flight)
      Violate(RankText(key.first) + " still waits for turn " + std::to_string(submission.turn->number) + " ('" + name +
              "')");
    const bool all_arrive = plan_.leaves_after.empty();  // else some fail before they are announced
    if (never_evicts_ && all_arrive && (member.hits != member.expected_hits || member.misses != member.expected_misses))
      Violate(RankText(key.first) + " sent " + std::to_string(member.hits) + " ids and " +
              std::to_string(member.misses) + " requests in set " + std::to_string(key.second) + ", expected " +
              std::to_string(member.expected_hits) + " and " + std::to_string(member.expected_misses));
  }
  if (!ended_.empty()) return;
  for (const auto& [set, batches] : batches_)
    for (const auto& [key, member] : members_)
      if (key.second == set && member.batches != batches.size() && plan_.leaves_after.empty())
        Violate(RankText(key.first) + " has run " + std::to_string(member.batches) + " of " +
                std::to_string(batches.size()) + " batches of set " + std::to_string(set));
}

}  // namespace simulation
}  // namespace ringtrain
