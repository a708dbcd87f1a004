#include "rank.h"

#include <algorithm>

namespace ringtrain {
namespace simulation {
namespace {

constexpr int kMostFrames = 64;  // taken in one step, as in coordinator.cc
constexpr Nanoseconds kShutdownTimeout = 5 * kSecond;

bool BlocksItsCaller(Operation operation) {
  return operation == Operation::kJoin || operation == Operation::kAddProcessSet || operation == Operation::kRemoveProcessSet;
}

}  // namespace

SimulatedRank::SimulatedRank(const Plan& plan, int rank, Judge* judge, Surroundings* surroundings)
    : plan_(plan),
      rank_(rank),
      judge_(judge),
      surroundings_(surroundings),
      random_({plan.seed, 2, static_cast<uint64_t>(rank)}),
      clock_offset_(static_cast<Nanoseconds>(random_.Below(100000)) * kSecond) {
  AddSet(0, plan.ranks);
  ids_[0] = 0;
  MakeProgram();
}

// ---- the program ----

// The rank's turns by round, in an order of its own within each; a join or what is abandoned is the last of its round.
void SimulatedRank::MakeProgram() {
  std::map<int, std::vector<const Turn*>> rounds;
  for (const Turn& turn : plan_.turns) {
    auto part = turn.parts.find(rank_);
    const bool takes_part = part != turn.parts.end() && part->second.act != Act::kAbsent;
    if (takes_part || turn.fenced) rounds[turn.fenced ? turn.parts.begin()->second.round : part->second.round].push_back(&turn);
  }
  auto key = [&](const Turn* turn) {
    auto part = turn->parts.find(rank_);
    const bool last = turn->request().operation == Operation::kJoin || (part != turn->parts.end() && part->second.act == Act::kAbandons);
    return std::make_pair(last, Mix({plan_.seed, 3, static_cast<uint64_t>(rank_), static_cast<uint64_t>(turn->number)}));
  };
  auto leaves = plan_.leaves_after.find(rank_);
  for (auto& [round, turns] : rounds) {
    if (leaves != plan_.leaves_after.end() && round > leaves->second) break;
    std::sort(turns.begin(), turns.end(), [&](const Turn* a, const Turn* b) { return key(a) < key(b); });
    const bool fenced = turns[0]->fenced;
    if (fenced) program_.push_back({Action::kFence, nullptr, 2 * round});
    for (const Turn* turn : turns)
      if (turn->parts.count(rank_) > 0) program_.push_back({Action::kAct, turn});
    if (fenced) program_.push_back({Action::kFence, nullptr, 2 * round + 1});
    const bool last = leaves != plan_.leaves_after.end() && round == leaves->second;
    if (!last && Mix({plan_.seed, 4, static_cast<uint64_t>(rank_), static_cast<uint64_t>(round)}) % 3 == 0)
      program_.push_back({Action::kWaitForAll});
  }
  const bool abandons = !program_.empty() && program_.back().turn != nullptr && program_.back().turn->parts.at(rank_).act == Act::kAbandons;
  if (!abandons) program_.push_back({Action::kWaitForAll});
  program_.push_back({Action::kLeave});
}

Nanoseconds SimulatedRank::ProgramDelay() { return static_cast<Nanoseconds>(random_.Below(plan_.program_delay + 1)); }

void SimulatedRank::RunProgram() {
  if (aborted_ || closed_ || program_.empty()) return;
  if (blocks_ != nullptr && judge_->InFlight(rank_, IdOf(blocks_->set), blocks_->name)) return;
  blocks_ = nullptr;
  if (!Perform(program_.front())) return;
  program_.pop_front();
  surroundings_->CallProgram(rank_, ProgramDelay());
}

// False if it must wait; whatever ends the wait calls the program again.
bool SimulatedRank::Perform(const Action& action) {
  switch (action.kind) {
    case Action::kAct:
      return Act(*action.turn);
    case Action::kWaitForAll:
      return judge_->Idle(rank_);
    case Action::kFence:
      if (!judge_->Idle(rank_) || !surroundings_->PassesFence(rank_, action.fence)) return false;
      fence_passed_ = surroundings_->now();
      return true;
    case Action::kLeave:
      leaving_ = true;
      close_by_ = surroundings_->now() + kShutdownTimeout;
      SayGoodbye(false);
      surroundings_->CallStep(rank_, 0);
      surroundings_->CallStep(rank_, kShutdownTimeout);
      return true;
  }
  return true;
}

bool SimulatedRank::Act(const Turn& turn) {
  const Part& part = turn.parts.at(rank_);
  if (part.delay > 0 && due_ == kNever) {
    due_ = (turn.fenced ? fence_passed_ : surroundings_->now()) + part.delay;
    surroundings_->CallProgram(rank_, due_ - surroundings_->now());
  }
  if (part.delay > 0 && surroundings_->now() < due_) return false;
  const int set = IdOf(turn.set);
  if (set < 0 || !MaySubmit(set, turn)) return false;
  if (part.act != Act::kRefuses) {
    const Request request = RequestOf(turn);
    judge_->Submitted(rank_, set, turn, request);
    if (BlocksItsCaller(request.operation)) blocks_ = &turn;
  }
  due_ = kNever;
  news_.push_back(&turn);
  surroundings_->CallStep(rank_, static_cast<Nanoseconds>(random_.Below(plan_.step_delay + 1)));
  return true;
}

// The rules of SubmissionTable: a name once at a time, and nothing pending in a set that goes.
bool SimulatedRank::MaySubmit(int set, const Turn& turn) const {
  if (judge_->InFlight(rank_, set, turn.name)) return false;
  if (turn.request().operation != Operation::kRemoveProcessSet) return true;
  const int removed = IdOf(static_cast<int>(turn.request().splits[0]));
  return removed >= 0 && !judge_->InFlight(rank_, removed);
}

int SimulatedRank::IdOf(int planned) const {
  auto id = ids_.find(planned);
  return id == ids_.end() ? -1 : id->second;
}

Request SimulatedRank::RequestOf(const Turn& turn) const {
  Request request = turn.parts.at(rank_).request;
  if (request.operation == Operation::kRemoveProcessSet) request.splits[0] = IdOf(static_cast<int>(request.splits[0]));
  return request;
}

std::string SimulatedRank::Whereabouts() const {
  if (program_.empty()) return "rank " + std::to_string(rank_) + " has left and waits to close";
  static const char* const kActions[] = {"act", "wait for all", "pass a fence", "leave"};
  const Action& action = program_.front();
  std::string text = "rank " + std::to_string(rank_) + " is to " + kActions[action.kind];
  if (action.turn != nullptr) text += " in turn " + std::to_string(action.turn->number);
  if (blocks_ != nullptr) text += " after turn " + std::to_string(blocks_->number);
  return text;
}

// ---- the driver, as Coordinator::Step ----

void SimulatedRank::Receive(int from, std::string bytes) {
  if (closed_ || aborted_) return;
  mail_.emplace_back(from, std::move(bytes));
  surroundings_->CallStep(rank_, static_cast<Nanoseconds>(random_.Below(plan_.step_delay + 1)));
}

void SimulatedRank::EndBatch(int set) {
  if (closed_ || aborted_) return;
  ended_batches_.push_back(set);
  surroundings_->CallStep(rank_, 0);
}

void SimulatedRank::TakeNews() {
  const std::vector<const Turn*> news = std::exchange(news_, {});
  for (const Turn* turn : news)
    if (turn->parts.at(rank_).act == Act::kRefuses) Take(*turn);
  for (const Turn* turn : news)
    if (turn->parts.at(rank_).act != Act::kRefuses) Take(*turn);
}

void SimulatedRank::Step() {
  if (closed_ || aborted_) return;
  TakeNews();
  for (int count = 0; count < kMostFrames && !mail_.empty(); ++count) {
    auto [from, bytes] = std::move(mail_.front());
    mail_.pop_front();
    Dispatch(from, bytes);
  }
  if (!mail_.empty()) surroundings_->CallStep(rank_, 0);
  Tick();
  if (!ended_batches_.empty()) {
    for (; !ended_batches_.empty(); ended_batches_.pop_front()) {
      Set& set = sets_.at(ended_batches_.front());
      judge_->Finished(rank_, ended_batches_.front(), set.running.front());
      set.running.pop_front();
      Feed(ended_batches_.front(), event::BatchFinished{});
    }
    for (const auto& [set, execute] : std::exchange(held_removals_, {})) RunControl(set, execute);
    Tick();
    surroundings_->CallProgram(rank_, ProgramDelay());
  }
  TryToClose();
}

void SimulatedRank::Take(const Turn& turn) {
  const Part& part = turn.parts.at(rank_);
  const int set = IdOf(turn.set);
  if (part.act == Act::kRefuses)
    Feed(set, event::Refused{{turn.name, StatusCode::kInvalidArgument, part.refusal}});
  else
    Feed(set, event::Submitted{RequestOf(turn)});
}

void SimulatedRank::Tick() {
  std::vector<int> ids;
  for (const auto& set : sets_) ids.push_back(set.first);
  bool moved = false;
  for (int id : ids) moved |= Feed(id, event::Tick{});
  if (moved) surroundings_->CallStep(rank_, 0);  // control operations are done at once, and more may be ready behind them
}

// Whether anything follows from the event.
bool SimulatedRank::Feed(int set, const Event& event) {
  auto found = sets_.find(set);
  if (found == sets_.end() || found->second.negotiator == nullptr) return false;
  Effects effects;
  found->second.negotiator->OnEvent(clock(), event, &effects);
  for (Effect& effect : effects) std::visit([&](auto& what) { On(set, what); }, effect);
  return !effects.empty();
}

void SimulatedRank::Dispatch(int from, const std::string& bytes) {
  Frame frame;
  if (!Frame::Decode(bytes, &frame)) return judge_->Violate("a frame from rank " + std::to_string(from) + " cannot be decoded");
  if (frame.type == FrameType::kGoodbye) return HearGoodbye(from, frame.flag);
  if (frame.type == FrameType::kAllGoodbye) {
    all_goodbye_ = true;
    clean_ = frame.flag;
    return;
  }
  if (frame.type == FrameType::kStalled) return;  // shows where Python is: there is none
  if (sets_.count(frame.process_set) == 0) {
    if (frame.process_set <= newest_set_) return;  // removed: a refusal that nobody has waited for
    early_frames_[frame.process_set].emplace_back(from, std::move(frame));
    return;
  }
  const int set = frame.process_set;
  Feed(set, event::Arrived{MemberOf(set, from), std::move(frame)});
}

int SimulatedRank::MemberOf(int set, int rank) const {
  const std::vector<int>& members = sets_.at(set).members;
  return static_cast<int>(std::lower_bound(members.begin(), members.end(), rank) - members.begin());
}

Nanoseconds SimulatedRank::next_timer() const {
  Nanoseconds next = kNever;
  if (closed_ || aborted_) return next;
  for (const auto& set : sets_)
    if (set.second.negotiator != nullptr) next = std::min(next, set.second.negotiator->next_timer());
  return next == kNever ? kNever : next - clock_offset_;
}

// ---- effects ----

void SimulatedRank::On(int set, effect::Send& send) {
  const std::vector<int>& members = sets_.at(set).members;
  judge_->Sent(rank_, set, send, members[0] == rank_);
  surroundings_->Send(rank_, members[static_cast<size_t>(send.member)], send.frame.Encode());
}

void SimulatedRank::On(int id, effect::Execute& execute) {
  Set& set = sets_.at(id);
  judge_->Executed(rank_, id, execute, set.members);
  if (!judge_->violation().empty()) return;
  const size_t index = set.batches++;
  if (Find(execute.responses[0].request.operation)->output == Output::kNone) return RunControl(id, execute);
  set.running.push_back(execute);
  surroundings_->BeginBatch(rank_, id, index, set.members);
}

void SimulatedRank::On(int set, effect::Fail& fail) {
  judge_->Failed(rank_, set, fail.name, fail.status);
  surroundings_->CallProgram(rank_, ProgramDelay());
}

void SimulatedRank::On(int, effect::Warn& warn) { judge_->Warned(rank_, warn.text); }

void SimulatedRank::On(int, effect::Abort& abort) { judge_->Violate("rank " + std::to_string(rank_) + " aborts: " + abort.cause); }

void SimulatedRank::On(int set, effect::Count& count) { judge_->Counted(rank_, set, count); }

void SimulatedRank::RunControl(int id, const effect::Execute& execute) {
  const Response& response = execute.responses[0];
  const std::vector<int64_t>& list = response.request.splits;
  if (response.request.operation == Operation::kRemoveProcessSet && !sets_.at(static_cast<int>(list[0])).running.empty()) {
    held_removals_.emplace_back(id, execute);
    return;
  }
  if (response.request.operation == Operation::kAddProcessSet) {
    ids_[judge_->TurnOf(rank_, id, response.request.name).creates] = response.result;
    AddSet(response.result, {list.begin(), list.end()});
  }
  if (response.request.operation == Operation::kRemoveProcessSet) {
    judge_->Removed(rank_, static_cast<int>(list[0]));
    sets_.erase(static_cast<int>(list[0]));
  }
  judge_->Finished(rank_, id, execute);
  Feed(id, event::BatchFinished{});
  surroundings_->CallProgram(rank_, ProgramDelay());
}

void SimulatedRank::AddSet(int id, const std::vector<int>& members) {
  if (sets_.count(id) > 0) return judge_->Violate("set " + std::to_string(id) + " is added twice");
  Set& set = sets_[id];
  set.members = members;
  newest_set_ = id;
  auto me = std::find(members.begin(), members.end(), rank_);
  if (me != members.end()) {
    NegotiatorOptions options = plan_.options;
    options.process_set = id;
    options.members = members;
    options.me = static_cast<int>(me - members.begin());
    set.negotiator = std::make_unique<Negotiator>(std::move(options));
  }
  auto early = early_frames_.find(id);
  if (early == early_frames_.end()) return;
  const auto frames = std::move(early->second);
  early_frames_.erase(early);
  for (const auto& [from, frame] : frames) Feed(id, event::Arrived{MemberOf(id, from), frame});
}

// ---- the end ----

void SimulatedRank::SayGoodbye(bool gone) {
  TakeNews();
  Tick();
  std::set<int> concerned = {plan_.ranks[0]};
  for (const auto& entry : sets_) {
    const Set& set = entry.second;
    if (set.negotiator == nullptr) continue;
    concerned.insert(set.members[0]);
    if (set.members[0] == rank_) concerned.insert(set.members.begin(), set.members.end());
  }
  Frame goodbye;
  goodbye.type = FrameType::kGoodbye;
  goodbye.flag = gone;
  for (int rank : concerned) surroundings_->Send(rank_, rank, goodbye.Encode());
}

void SimulatedRank::HearGoodbye(int from, bool gone) {
  std::vector<int> ids;
  for (const auto& set : sets_) ids.push_back(set.first);
  for (int id : ids) {
    auto set = sets_.find(id);
    if (set != sets_.end() && std::binary_search(set->second.members.begin(), set->second.members.end(), from))
      Feed(id, event::Left{MemberOf(id, from), gone});
  }
  if (rank_ != plan_.ranks[0] || gone) return;
  goodbyes_[from] = true;
  if (goodbyes_.size() == plan_.ranks.size()) TellAll(true);
}

void SimulatedRank::TellAll(bool clean) {
  Frame all;
  all.type = FrameType::kAllGoodbye;
  all.flag = clean;
  for (int rank : plan_.ranks) surroundings_->Send(rank_, rank, all.Encode());
}

bool SimulatedRank::busy() const {
  return std::any_of(sets_.begin(), sets_.end(), [](const auto& set) { return !set.second.running.empty(); });
}

void SimulatedRank::TryToClose() {
  if (!leaving_ || busy()) return;
  if (!all_goodbye_ && surroundings_->now() < close_by_) return;
  closed_ = true;
  if (!clean_) {
    judge_->Closed(rank_);
    SayGoodbye(true);
    if (rank_ == plan_.ranks[0] && !all_goodbye_) TellAll(false);
    return;
  }
  for (const auto& [id, set] : sets_) {
    if (set.negotiator == nullptr) continue;
    if (set.negotiator->pending() || set.negotiator->next_timer() != kNever)
      judge_->Violate("rank " + std::to_string(rank_) + " closes, but set " + std::to_string(id) + " still has something to do");
  }
  if (!early_frames_.empty()) judge_->Violate("rank " + std::to_string(rank_) + " keeps frames of a set that it never knew");
}

void SimulatedRank::Abort() {
  if (closed_ || aborted_) return;
  aborted_ = true;
  judge_->Aborted(rank_);
}

}  // namespace simulation
}  // namespace ringtrain
