#include "rank.h"

#include <algorithm>

#include "faults.h"

namespace ringtrain {
namespace simulation {
namespace {

constexpr int kMaxFrames = 64;  // taken in one step, as in rank_loop.cc
constexpr Nanoseconds kShutdownTimeout = 5 * kSecond;

bool BlocksItsCaller(Operation operation) {
  return operation == Operation::kJoin || operation == Operation::kAddProcessSet ||
         operation == Operation::kRemoveProcessSet;
}

}  // namespace

SimulatedRank::SimulatedRank(const Plan& plan, int rank, Judge* judge, Surroundings* surroundings)
    : plan_(plan),
      rank_(rank),
      judge_(judge),
      surroundings_(surroundings),
      random_({plan.seed, 2, static_cast<uint64_t>(rank)}),
      clock_offset_(static_cast<Nanoseconds>(random_.Below(100000)) * kSecond),
      protocol_(surroundings->world(), plan.options, plan.fanout) {
  ids_[0] = 0;
  protocol_.Begin(clock(), &effects_);
  CarryOut();
  MakeProgram();
}

// ---- the program ----

// The rank's turns by round, in an order of its own within each; a join or what is abandoned is the last of its round.
void SimulatedRank::MakeProgram() {
  std::map<int, std::vector<const Turn*>> rounds;
  for (const Turn& turn : plan_.turns) {
    auto part = turn.parts.find(rank_);
    const bool takes_part = part != turn.parts.end() && part->second.act != Act::kAbsent;
    if (takes_part || turn.fenced)
      rounds[turn.fenced ? turn.parts.begin()->second.round : part->second.round].push_back(&turn);
  }
  auto key = [&](const Turn* turn) {
    auto part = turn->parts.find(rank_);
    const bool last = turn->request().operation == Operation::kJoin ||
                      (part != turn->parts.end() && part->second.act == Act::kAbandons);
    return std::make_pair(last,
                          Mix({plan_.seed, 3, static_cast<uint64_t>(rank_), static_cast<uint64_t>(turn->number)}));
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
  const bool abandons = !program_.empty() && program_.back().turn != nullptr &&
                        program_.back().turn->parts.at(rank_).act == Act::kAbandons;
  if (!abandons) program_.push_back({Action::kWaitForAll});
  if (plan_.lingers.count(rank_) > 0) program_.push_back({Action::kLinger});
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
    case Action::kLinger:
      return HasPassed(plan_.lingers.at(rank_));
    case Action::kLeave:
      leaving_ = true;
      if (!plan_.waits_at_exit || plan_.leaves_after.count(rank_) > 0)
        close_by_ = surroundings_->now() + kShutdownTimeout;
      TakeNews();
      protocol_.SayGoodbye(clock(), &effects_);
      CarryOut();
      surroundings_->CallStep(rank_, 0);
      if (close_by_ != kNever) surroundings_->CallStep(rank_, kShutdownTimeout);
      return true;
  }
  return true;
}

bool SimulatedRank::Act(const Turn& turn) {
  const Part& part = turn.parts.at(rank_);
  if (part.long_phase > 0 && due_ == kNever) Announce(part.long_phase);
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
  if (part.long_phase > 0) Announce(0);  // it is back
  news_.push_back(&turn);
  surroundings_->CallStep(rank_, static_cast<Nanoseconds>(random_.Below(plan_.step_delay + 1)));
  return true;
}

// Since the program first came here.
bool SimulatedRank::HasPassed(Nanoseconds time) {
  if (due_ == kNever) {
    due_ = surroundings_->now() + time;
    surroundings_->CallProgram(rank_, time);
  }
  if (surroundings_->now() < due_) return false;
  due_ = kNever;
  return true;
}

void SimulatedRank::Announce(Nanoseconds long_phase) {
  long_phase_ = long_phase;
  surroundings_->CallStep(rank_, 0);
}

bool SimulatedRank::Raise() {
  if (ended() || leaving_) return false;
  raised_ = RaisedText(rank_);
  surroundings_->CallStep(rank_, 0);
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
  static const char* const kActions[] = {"act", "wait for all", "pass a fence", "linger", "leave"};
  const Action& action = program_.front();
  std::string text = "rank " + std::to_string(rank_) + " is to " + kActions[action.kind];
  if (action.turn != nullptr) text += " in turn " + std::to_string(action.turn->number);
  if (blocks_ != nullptr) text += " after turn " + std::to_string(blocks_->number);
  return text;
}

// ---- the driver, as RankLoop::Step ----

void SimulatedRank::Receive(int from, std::string bytes) {
  if (ended()) return;
  mail_.emplace_back(from, std::move(bytes));
  if (HasWork() || !plan_.idle_ranks_doze)
    surroundings_->CallStep(rank_, static_cast<Nanoseconds>(random_.Below(plan_.step_delay + 1)));
}

void SimulatedRank::LosePeer(int rank, const std::string& cause) {
  if (ended()) return;
  lost_.emplace_back(rank, cause);
  Ring();
}

void SimulatedRank::Ring() {
  if (HasWork() || !plan_.idle_ranks_doze) surroundings_->CallStep(rank_, 0);
}

void SimulatedRank::EndBatch(int set) {
  if (ended()) return;
  ended_batches_.push_back(set);
  surroundings_->CallStep(rank_, 0);
}

void SimulatedRank::Step() {
  if (ended()) return;
  last_step_ = surroundings_->now();
  surroundings_->life(rank_).begun = true;
  HeedAbort();
  LookForTheDead();
  PassOnLongPhase();
  TakeNews();
  LookAtPromises();
  TakeMail();
  if (mail_.empty()) {
    TakeLostPeers();
    protocol_.MailTaken(clock(), &effects_);
    CarryOut();
  }
  if (Tick()) surroundings_->CallStep(rank_, 0);  // control operations are done at once: more may be ready behind them
  if (!ended_batches_.empty()) EndBatches();
  TryToClose();
}

Nanoseconds SimulatedRank::next_timer() const {
  if (ended()) return kNever;
  const auto at = [&](Nanoseconds timer) { return timer == kNever ? kNever : timer - clock_offset_; };
  if (HasWork()) return at(protocol_.next_timer());
  const Nanoseconds idle = last_step_ + protocol_.idle_period();
  return plan_.idle_ranks_doze ? idle : std::min(idle, at(protocol_.next_stall()));
}

void SimulatedRank::HeedAbort() {
  const std::string& notice = surroundings_->notice(rank_);
  if (!notice.empty()) protocol_.HearEnd(Status::PeerLost(notice), &effects_);
  CarryOut();
  if (!raised_.empty() && !ended()) protocol_.Abort(Status::PeerLost(raised_), &effects_);
  CarryOut();
}

void SimulatedRank::PassOnLongPhase() {
  if (long_phase_ >= 0) protocol_.LongPhase(clock(), std::exchange(long_phase_, -1), &effects_);
  CarryOut();
}

void SimulatedRank::TakeNews() {
  const std::vector<const Turn*> news = std::exchange(news_, {});
  for (const Turn* turn : news)
    if (turn->parts.at(rank_).act == Act::kRefuses) Take(*turn);
  for (const Turn* turn : news)
    if (turn->parts.at(rank_).act != Act::kRefuses) Take(*turn);
}

void SimulatedRank::Take(const Turn& turn) {
  const Part& part = turn.parts.at(rank_);
  const int set = IdOf(turn.set);
  if (part.act == Act::kRefuses)
    protocol_.Refused(clock(), set, {turn.name, StatusCode::kInvalidArgument, part.refusal}, &effects_);
  else
    protocol_.Submitted(clock(), set, RequestOf(turn), &effects_);
  CarryOut();
}

void SimulatedRank::TakeMail() {
  for (int count = 0; count < kMaxFrames && !mail_.empty() && !ended(); ++count) {
    auto [from, bytes] = std::move(mail_.front());
    mail_.pop_front();
    ++arrivals_[from];
    Frame frame;
    if (!Frame::Decode(bytes, &frame))
      return judge_->Violate("a frame from rank " + std::to_string(from) + " cannot be decoded");
    if (frame.type == FrameType::kPromise && sets_.count(frame.process_set) > 0 &&
        !sets_.at(frame.process_set).ahead.Receive(frame.schedule, frame.text))
      return judge_->Violate("what a promise of rank " + std::to_string(from) + " carries cannot be decoded");
    protocol_.Arrived(clock(), from, std::move(frame), &effects_);
    CarryOut();
  }
  if (!mail_.empty()) surroundings_->CallStep(rank_, 0);
}

// As RankLoop::LookAtPromises.
void SimulatedRank::LookAtPromises() {
  if (protocol_.aborted()) return;
  protocol_.ForEachWatched([&](int set, const std::vector<int>& ranks) {
    std::vector<PromiseSign> signs = SignsOf(set, ranks);
    if (signs != seen_[set]) seen_changed_.emplace_back(set, seen_[set] = std::move(signs));
  });
  for (auto& [set, signs] : std::exchange(seen_changed_, {})) {
    protocol_.Seen(clock(), set, std::move(signs), &effects_);
    CarryOut();
  }
}

std::vector<PromiseSign> SimulatedRank::SignsOf(int set, const std::vector<int>& ranks) const {
  std::vector<PromiseSign> signs;
  for (int rank : ranks) signs.push_back(surroundings_->promise(rank, set));
  return signs;
}

void SimulatedRank::TakeLostPeers() {
  for (; !lost_.empty() && !ended(); lost_.pop_front()) {
    protocol_.ConnectionLost({lost_.front().first, lost_.front().second}, &effects_);
    CarryOut();
  }
}

void SimulatedRank::EndBatches() {
  for (; !ended_batches_.empty() && !ended(); ended_batches_.pop_front()) {
    Set& set = sets_.at(ended_batches_.front());
    judge_->Finished(rank_, ended_batches_.front(), set.running.front());
    set.running.pop_front();
    protocol_.BatchFinished(clock(), ended_batches_.front(), &effects_);
    CarryOut();
  }
  Tick();
  surroundings_->CallProgram(rank_, ProgramDelay());
}

bool SimulatedRank::busy() const {
  return std::any_of(sets_.begin(), sets_.end(), [](const auto& set) { return !set.second.running.empty(); });
}

// As ContextDriver::Serve.
void SimulatedRank::TryToClose() {
  if (ended() || !leaving_ || busy()) return;
  if (!protocol_.released() && surroundings_->now() < close_by_) return;
  closed_ = true;
  surroundings_->life(rank_).Leave();
  if (!protocol_.clean()) {
    judge_->Closed(rank_);
    protocol_.GiveUpWaiting(clock(), &effects_);
    return CarryOut();
  }
  if (protocol_.pending() || protocol_.next_stall() != kNever)
    judge_->Violate("rank " + std::to_string(rank_) + " closes, but still has something to do");
  if (protocol_.early_frames() > 0)
    judge_->Violate("rank " + std::to_string(rank_) + " keeps frames of a set that it never knew");
}

// ---- what the protocol decides ----

void SimulatedRank::CarryOut() {
  while (!effects_.empty()) {
    carried_out_.swap(effects_);
    for (RankEffect& effect : carried_out_) std::visit([&](auto& what) { CarryOut(what); }, effect);
    carried_out_.clear();
    RemoveProcessSets();
  }
}

void SimulatedRank::CarryOut(rank_effect::Send& send) {
  auto set = sets_.find(send.frame.process_set);
  for (const PromisedBatch& batch : send.ahead)
    set->second.ahead.Send(send.frame.schedule, batch.number,
                           judge_->ContributionOf(rank_, send.frame.process_set, batch.responses), &send.frame.text);
  if (set != sets_.end())
    judge_->Sent(rank_, send.frame, set->second.members[0] == rank_, set->second.members[0] == send.rank);
  surroundings_->Send(rank_, send.rank, send.frame);
}

void SimulatedRank::CarryOut(rank_effect::Start& start) {
  if (protocol_.aborted()) return;
  Set& set = sets_.at(start.process_set);
  judge_->Executed(rank_, start.process_set, start.batch, set.members);
  if (start.batch.scheduled)
    judge_->WentAhead(rank_, start.process_set, start.batch, set.ahead.Take(start.batch.schedule, start.batch.batch));
  if (!judge_->violation().empty()) return;
  set.running.push_back(start.batch);
  surroundings_->BeginBatch(rank_, start.process_set, set.batches++, set.members);
}

void SimulatedRank::CarryOut(rank_effect::Promise& promise) {
  surroundings_->promise(rank_, promise.process_set) = promise.sign;
  protocol_.ForEachWatched([&](int set, const std::vector<int>& ranks) {
    if (set == promise.process_set) seen_[set] = SignsOf(set, ranks);
  });
  protocol_.Seen(clock(), promise.process_set, seen_[promise.process_set], &effects_);
}

void SimulatedRank::CarryOut(rank_effect::Finish& finish) {
  judge_->Executed(rank_, finish.process_set, finish.control, sets_.at(finish.process_set).members);
  if (!judge_->violation().empty()) return;
  const Response& response = finish.control.responses[0];
  if (response.request.operation == Operation::kAddProcessSet)
    ids_[judge_->TurnOf(rank_, finish.process_set, response.request.name).creates] = response.result;
  judge_->Finished(rank_, finish.process_set, finish.control);
  surroundings_->CallProgram(rank_, ProgramDelay());
}

void SimulatedRank::CarryOut(rank_effect::Fail& fail) {
  judge_->Failed(rank_, fail.process_set, fail.name, fail.status);
  surroundings_->FailureTold(rank_);
  surroundings_->CallProgram(rank_, ProgramDelay());
}

void SimulatedRank::CarryOut(rank_effect::AddProcessSet& added) {
  if (sets_.count(added.process_set) > 0)
    return judge_->Violate("set " + std::to_string(added.process_set) + " is added twice");
  sets_[added.process_set].members = added.members;
}

void SimulatedRank::CarryOut(rank_effect::NoteCause& note) {
  std::string& notice = surroundings_->notice(rank_);
  if (notice.empty()) notice = note.cause.message();
  protocol_.CauseNoted(Status::PeerLost(notice), &effects_);
}

void SimulatedRank::CarryOut(rank_effect::End& end) {
  aborted_ = true;
  surroundings_->life(rank_).Leave();
  judge_->Ended(rank_, surroundings_->now(), end.cause.message());
}

bool SimulatedRank::Tick() {
  RemoveProcessSets();
  const bool moved = protocol_.Tick(clock(), &effects_);
  CarryOut();
  return moved;
}

void SimulatedRank::RemoveProcessSets() {
  for (int id : std::exchange(removals_, {})) {
    if (!sets_.at(id).running.empty()) {
      removals_.push_back(id);
      continue;
    }
    judge_->Removed(rank_, id);
    sets_.erase(id);
    protocol_.ProcessSetRemoved(clock(), id, &effects_);
  }
}

void SimulatedRank::LookForTheDead() {
  if (clock() < protocol_.next_look()) return;
  protocol_.Look(clock(), Signs(), &effects_);
  CarryOut();
}

SignsOfLife SimulatedRank::Signs() const {
  const World& world = surroundings_->world();
  SignsOfLife signs(world.host_of.size());
  for (const auto& [rank, count] : arrivals_) signs[rank].count = count;
  for (int rank : world.hosts[world.host_of[rank_]]) {
    const Life& life = surroundings_->life(rank);
    signs[rank] = {life.left, life.ended, life.beats};
  }
  return signs;
}

}  // namespace simulation
}  // namespace ringtrain
