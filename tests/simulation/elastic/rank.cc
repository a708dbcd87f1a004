#include "rank.h"

#include <algorithm>

namespace ringtrain {
namespace elastic {
namespace {

World WorldOf(const std::vector<Member>& members, const Uid& me, const EpochId& epoch) {
  World world;
  world.size = static_cast<int>(members.size());
  world.epoch = static_cast<uint32_t>(epoch.count);
  world.local_rank_of.assign(members.size(), 0);
  std::vector<std::string> keys;
  for (const Member& member : members) {
    if (member.process.uid == me) world.rank = static_cast<int>(keys.size());
    keys.push_back(member.process.host);
  }
  world.host_names = keys;
  std::map<std::string, int> place_of;
  for (size_t rank = 0; rank < keys.size(); ++rank) {
    const int host = place_of.emplace(keys[rank], static_cast<int>(world.hosts.size())).first->second;
    if (host == static_cast<int>(world.hosts.size())) world.hosts.emplace_back();
    world.host_of.push_back(host);
    std::vector<int>& local = world.hosts[static_cast<size_t>(host)];
    world.local_rank_of[rank] = static_cast<int>(local.size());
    local.push_back(static_cast<int>(rank));
  }
  return world;
}

Request RequestOf(const std::string& name) {
  Request request;
  request.name = name;
  request.tensors = {{DType::kFloat32, {4}}};
  return request;
}

}  // namespace

SimulatedRank::SimulatedRank(const Plan& plan, Process process, const std::string& program, Judge* judge,
                             Surroundings* surroundings)
    : plan_(plan),
      process_(process),
      program_(program),
      judge_(judge),
      surroundings_(surroundings),
      random_({plan.seed, 3, process.uid.low}),
      transaction_(process.uid, plan.share),
      membership_(process, program, {kSilence, plan.grace}, &transaction_) {
  options_.dead_after_seconds = static_cast<double>(kSilence) / 1e9;
  options_.cache_capacity = plan.cache_capacity;
  options_.fusion_threshold_bytes = plan.fusion_threshold_bytes;
  options_.stall_warning_seconds = 3000;
  options_.stall_abort_seconds = 0;
}

void SimulatedRank::Begin() {
  membership_.Begin(surroundings_->now(), &actions_);
  Step();
}

void SimulatedRank::Hear(const ControlFrame& frame) {
  membership_.Arrived(surroundings_->now(), frame, &actions_);
  Step();
}

void SimulatedRank::Notice() {
  membership_.Noticed(&actions_);
  Step();
}

void SimulatedRank::Step() {
  if (over_) return;
  if (surroundings_->now() >= armed_) armed_ = kNever;
  CarryOutMembership();
  membership_.Tick(surroundings_->now(), &actions_);
  CarryOutMembership();
  if (over_) return;
  HeedNotice();
  LookForTheDead();
  Program();
  for (bool moved = true; moved && !over_ && protocol_ && !broken_;) {
    moved = protocol_->Tick(surroundings_->now(), &effects_);
    CarryOutProtocol();
  }
  if (!over_) Arm();
}

void SimulatedRank::Arm() {
  Nanoseconds next = std::min(membership_.next_timer(), program_at_);
  if (protocol_ && !broken_) next = std::min(next, protocol_->next_look());
  if (next == kNever || next >= armed_) return;
  armed_ = next;
  surroundings_->Call(process_.uid, std::max<Nanoseconds>(next - surroundings_->now(), 1));
}

// ---- the program ----

// Draws its samples, submits in an order of its own, and waits for the release.
void SimulatedRank::Program() {
  if (finished_ || surroundings_->now() < program_at_) return;
  if (!window_) {
    if (transaction_.released() == plan_.steps && membership_.holds_state() && transaction_.running()) {
      finished_ = true;
      program_at_ = kNever;
      judge_->Finished(process_.uid, transaction_.progress());
      membership_.Finished(&actions_);
      return CarryOutMembership();
    }
    if (!transaction_.may_begin()) return void(program_at_ = kNever);
    window_.emplace();
    window_->samples = transaction_.Begin();
    for (int operation = 0; operation < plan_.operations; ++operation)
      window_->to_submit.push_back("gradient " + std::to_string(operation));
  } else if (!window_->to_submit.empty()) {
    const size_t place = random_.Below(window_->to_submit.size());
    const std::string name = window_->to_submit[place];
    window_->to_submit.erase(window_->to_submit.begin() + static_cast<std::ptrdiff_t>(place));
    window_->inputs[name] = {process_.uid, transaction_.released() + 1, window_->samples};
    if (transaction_.Submitted(name)) Submit(name);
  } else if (!window_->closed) {
    window_->closed = true;
    transaction_.Closed(&transaction_effects_);
    program_at_ = kNever;
    return CarryOutTransaction();
  }
  program_at_ = surroundings_->now() + 1 + random_.Between(0, 2 * plan_.window / (plan_.operations + 1));
}

void SimulatedRank::Submit(const std::string& name) {
  if (!protocol_ || broken_) return;
  protocol_->Submitted(surroundings_->now(), 0, RequestOf(name), &effects_);
  CarryOutProtocol();
}

// ---- from other ranks ----

void SimulatedRank::Receive(Message message) {
  if (over_) return;
  if (message.kind == Message::kHello || message.kind == Message::kHelloAnswer || message.kind == Message::kState) {
    if (membership_.WhenToTake(message.epoch) == Membership::Arrival::kKeep) kept_.push_back(std::move(message));
    TakeKept();
    return Step();
  }
  switch (WhenToTake(message)) {
    case Membership::Arrival::kTake:
      Take(message);
      break;
    case Membership::Arrival::kKeep:
      if (message.kind == Message::kRuns) membership_.PeerRuns(message.epoch, &actions_);
      kept_.push_back(std::move(message));
      break;
    case Membership::Arrival::kRefuse:
      return;
  }
  Step();
}

Membership::Arrival SimulatedRank::WhenToTake(const Message& message) const {
  return membership_.WhenToTake(message.epoch);
}

// What was early for the world that forms, or runs.
void SimulatedRank::TakeKept() {
  std::deque<Message> kept;
  kept.swap(kept_);
  for (Message& message : kept) {
    const Membership::Arrival arrival = membership_.WhenToTake(message.epoch);
    if (arrival == Membership::Arrival::kRefuse) continue;
    const bool forming = connecting_ == message.epoch;
    if (message.kind == Message::kHello && forming) {
      surroundings_->Send(process_.uid, message.from, Of(Message::kHelloAnswer, message.epoch));
    } else if (message.kind == Message::kHelloAnswer && forming) {
      membership_.Reached(message.epoch, message.from, &actions_);
    } else if (message.kind == Message::kState && forming) {
      membership_.TookState(message.epoch, message.from, message.progress, &actions_);
    } else if (arrival == Membership::Arrival::kTake) {
      Take(message);
    } else {
      kept_.push_back(std::move(message));
    }
  }
}

void SimulatedRank::Take(Message& message) {
  judge_->Took(message.epoch, membership_.epoch());
  ++arrivals_[message.from];
  switch (message.kind) {
    case Message::kFrame: {
      Frame frame;
      if (!Frame::Decode(message.bytes, &frame)) return judge_->Violate("a frame cannot be decoded");
      if (!protocol_ || broken_) return;
      const auto from = std::find_if(membership_.members().begin(), membership_.members().end(),
                                     [&](const Member& member) { return member.process.uid == message.from; });
      protocol_->Arrived(surroundings_->now(), static_cast<int>(from - membership_.members().begin()), std::move(frame),
                         &effects_);
      return CarryOutProtocol();
    }
    case Message::kContribution:
      arrived_[message.name][message.from] = message.contribution;
      return FinishResults();
    case Message::kWhole:
      transaction_.PeerIsWhole(message.from, message.step, message.pauses, &transaction_effects_);
      return CarryOutTransaction();
    default:
      return;
  }
}

void SimulatedRank::FinishResults() {
  while (!batches_.empty() && !broken_) {
    const effect::Execute& batch = batches_.front();
    for (const Response& response : batch.responses)
      if (arrived_[response.request.name].size() < membership_.members().size()) return;
    std::vector<std::string> names;
    for (const Response& response : batch.responses) names.push_back(response.request.name);
    batches_.pop_front();
    protocol_->BatchFinished(surroundings_->now(), 0, &effects_);
    for (const std::string& name : names) {
      sums_[name] = {membership_.epoch(), std::move(arrived_[name])};
      arrived_.erase(name);
      transaction_.ResultHeld(name, &transaction_effects_);
    }
    CarryOutTransaction();
    CarryOutProtocol();
  }
}

// ---- liveness ----

void SimulatedRank::HeedNotice() {
  if (!protocol_ || broken_) return;
  const std::string& notice = surroundings_->notice(process_.host, membership_.epoch());
  if (!notice.empty()) protocol_->Abort(Status::PeerLost(notice), &effects_);
  CarryOutProtocol();
}

void SimulatedRank::LookForTheDead() {
  if (!protocol_ || broken_ || surroundings_->now() < protocol_->next_look()) return;
  const Nanoseconds now = surroundings_->now();
  protocol_->Look(now, Signs(), &effects_);
  membership_.Look(UidsOfRanks(protocol_->Silent(now, kSilence / 2)), UidsOfRanks(protocol_->Silent(now, kSilence)),
                   &actions_);
  CarryOutProtocol();
  CarryOutMembership();
}

Uids SimulatedRank::UidsOfRanks(const std::vector<int>& ranks) const {
  Uids uids;
  for (int rank : ranks) uids.push_back(membership_.members()[static_cast<size_t>(rank)].process.uid);
  return uids;
}

SignsOfLife SimulatedRank::Signs() const {
  SignsOfLife signs(membership_.members().size());
  for (size_t rank = 0; rank < signs.size(); ++rank) {
    const Process& process = membership_.members()[rank].process;
    const auto arrivals = arrivals_.find(process.uid);
    if (process.host == process_.host) {
      const Life& life = surroundings_->life(process.uid);
      signs[rank] = {life.left, life.died, life.beats};
    } else if (arrivals != arrivals_.end()) {
      signs[rank].count = arrivals->second;
    }
  }
  return signs;
}

// ---- what the protocol decides ----

void SimulatedRank::CarryOutProtocol() {
  while (!effects_.empty()) {
    RankEffects effects;
    effects.swap(effects_);
    for (RankEffect& effect : effects) std::visit([this](auto& what) { CarryOut(what); }, effect);
  }
}

void SimulatedRank::CarryOut(rank_effect::Send& send) {
  if (broken_) return;
  Message message = Of(Message::kFrame, membership_.epoch());
  message.bytes = send.frame.Encode();
  surroundings_->Send(process_.uid, membership_.members()[static_cast<size_t>(send.rank)].process.uid,
                      std::move(message));
}

void SimulatedRank::CarryOut(rank_effect::Start& start) {
  if (broken_ || protocol_->aborted()) return;
  batches_.push_back(start.batch);
  for (const Response& response : start.batch.responses) {
    const std::string& name = response.request.name;
    const auto input = window_ ? window_->inputs.find(name) : decltype(window_->inputs.end())();
    if (!window_ || input == window_->inputs.end())
      return judge_->Violate("an operation is carried out of which the input is gone");
    Message message = Of(Message::kContribution, membership_.epoch());
    message.name = name;
    message.contribution = input->second;
    SendToAll(message);
    arrived_[name][process_.uid] = input->second;
  }
  FinishResults();
}

void SimulatedRank::CarryOut(rank_effect::Fail& fail) {
  if (!broken_ && !finished_) judge_->Violate("an operation fails: " + fail.status.message());
}

void SimulatedRank::CarryOut(rank_effect::Beat&) { ++surroundings_->life(process_.uid).beats; }

void SimulatedRank::CarryOut(rank_effect::NoteCause& note) {
  surroundings_->Trace(process_.uid, "ends the epoch: " + note.cause.message());
  std::string& notice = surroundings_->notice(process_.host, membership_.epoch());
  if (notice.empty()) notice = note.cause.message();
  protocol_->CauseNoted(Status::PeerLost(notice), &effects_);
}

void SimulatedRank::CarryOut(rank_effect::Wake& wake) {
  surroundings_->Call(membership_.members()[static_cast<size_t>(wake.rank)].process.uid, kMillisecond / 10);
}

// ---- what membership and transaction decide ----

void SimulatedRank::CarryOutMembership() {
  while (!actions_.empty() && !over_) {
    MembershipActions actions;
    actions.swap(actions_);
    for (MembershipAction& action : actions)
      if (!over_) std::visit([this](auto& what) { Do(what); }, action);
  }
}

void SimulatedRank::CarryOutTransaction() {
  while (!transaction_effects_.empty()) {
    TransactionEffects effects;
    effects.swap(transaction_effects_);
    for (TransactionEffect& effect : effects) Do(effect);
  }
  CarryOutMembership();
}

void SimulatedRank::Do(membership_action::Send& send) {
  if (send.frame.type == ControlType::kReport) {
    ControlFrame bare = send.frame;
    bare.uids.clear();
    judge_->Kept(transaction_.kept(), bare.Encode().size());
  }
  surroundings_->TellAgent(process_.uid, send.frame);
}

void SimulatedRank::Do(membership_action::Abandon&) {
  broken_ = true;
  effects_.clear();
  batches_.clear();
  arrived_.clear();
  connecting_ = {};
}

void SimulatedRank::Do(membership_action::Connect& connect) {
  connecting_ = connect.form.epoch;
  membership_.Reached(connecting_, process_.uid, &actions_);
  for (const Member& member : connect.form.members)
    if (member.process.uid != process_.uid)
      surroundings_->Send(process_.uid, member.process.uid, Of(Message::kHello, connecting_));
  TakeKept();
}

void SimulatedRank::Do(membership_action::GiveState& give) {
  judge_->Gave(process_.uid);
  Message state = Of(Message::kState, connecting_);
  state.progress = transaction_.progress();
  surroundings_->Send(process_.uid, give.to, std::move(state));
}

// A new Epoch object, as context.cc will have it: nothing of the old one is left.
void SimulatedRank::Do(membership_action::Run&) {
  surroundings_->Trace(process_.uid, "runs epoch " + std::to_string(membership_.epoch().count) + " at step " +
                                         std::to_string(transaction_.released()));
  judge_->Ran(surroundings_->now(), process_.uid, membership_.epoch(), membership_.members(), transaction_.progress());
  judge_->HasProgram(membership_.epoch(), program_);
  connecting_ = {};
  arrivals_.clear();
  sums_.clear();
  broken_ = false;
  world_ = WorldOf(membership_.members(), process_.uid, membership_.epoch());
  protocol_ = std::make_unique<Protocol>(world_, options_);
  protocol_->Begin(surroundings_->now(), &effects_);
  CarryOutProtocol();
  SendToAll(Of(Message::kRuns, membership_.epoch()));
  if (program_at_ == kNever && !finished_) program_at_ = surroundings_->now();
  TakeKept();
}

void SimulatedRank::Do(membership_action::Depart&) {
  if (protocol_ && !broken_) {
    protocol_->GiveUpWaiting(surroundings_->now(), &effects_);
    CarryOutProtocol();
  }
  over_ = true;
  surroundings_->life(process_.uid).left = true;
  surroundings_->Exit(process_.uid, 0);
}

void SimulatedRank::Do(membership_action::Fence& fence) {
  surroundings_->Trace(process_.uid, "is fenced: " + fence.cause);
  if (fence.cause.find("step") != std::string::npos) judge_->Violate("E2: a rank is fenced: " + fence.cause);
  over_ = true;
  surroundings_->Exit(process_.uid, 1);
}

// A message whose acknowledgement was lost with a connection is sent again.
void SimulatedRank::Do(transaction_effect::TellWhole& tell) {
  Message message = Of(Message::kWhole, membership_.epoch());
  message.step = tell.step;
  message.pauses = tell.pauses;
  SendToAll(message);
  if (random_.OneIn(4)) SendToAll(message);
}

void SimulatedRank::Do(transaction_effect::Release& release) {
  judge_->Released(surroundings_->now(), process_.uid, membership_.epoch(), transaction_.running(), release.step,
                   release.divisor, sums_);
  sums_.clear();
  window_.reset();
  program_at_ = surroundings_->now() + 1 + random_.Between(0, plan_.window);
}

void SimulatedRank::Do(transaction_effect::Submit& submit) {
  for (const std::string& name : submit.names) Submit(name);
}

void SimulatedRank::Do(transaction_effect::Pause&) { membership_.Paused(&actions_); }

void SimulatedRank::SendToAll(const Message& message) {
  for (const Member& member : membership_.members())
    if (member.process.uid != process_.uid) surroundings_->Send(process_.uid, member.process.uid, message);
}

Message SimulatedRank::Of(Message::Kind kind, const EpochId& epoch) const {
  Message message;
  message.kind = kind;
  message.epoch = epoch;
  message.from = process_.uid;
  return message;
}

}  // namespace elastic
}  // namespace ringtrain
