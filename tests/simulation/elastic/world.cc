#include "world.h"

#include <algorithm>
#include <utility>

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

SimulatedWorld::SimulatedWorld(const Plan& plan, const Process& process, const ControlFrame& form, Judge* judge,
                               Surroundings* surroundings)
    : process_(process),
      epoch_(form.epoch),
      members_(form.members),
      judge_(judge),
      surroundings_(surroundings),
      world_(WorldOf(members_, process.uid, epoch_)) {
  options_.dead_after_seconds = static_cast<double>(kSilence) / 1e9;
  options_.cache_capacity = plan.cache_capacity;
  options_.fusion_threshold_bytes = plan.fusion_threshold_bytes;
  options_.stall_warning_seconds = static_cast<double>(kStall / 2) / 1e9;
  options_.stall_abort_seconds = static_cast<double>(kStall) / 1e9;
  protocol_ = std::make_unique<Protocol>(world_, options_);
  protocol_->Begin(surroundings_->now(), &effects_);
  CarryOut();
}

// ---- the program ----

void SimulatedWorld::Submit(const std::string& name, const Gift& gift) {
  if (ended_) return;
  given_[name] = gift;
  protocol_->Submitted(surroundings_->now(), 0, RequestOf(name), &effects_);
  CarryOut();
}

const Gifts* SimulatedWorld::ResultOf(const std::string& name) const {
  const auto found = results_.find(name);
  return found == results_.end() ? nullptr : &found->second;
}

Uids SimulatedWorld::UidsOf(const std::vector<int>& ranks) const {
  Uids uids;
  for (int rank : ranks) uids.push_back(members_[static_cast<size_t>(rank)].process.uid);
  return uids;
}

Uids SimulatedWorld::Silent() const { return UidsOf(protocol_->Silent(surroundings_->now())); }

// As Suspicions::Of.
Uids SimulatedWorld::unheard() const {
  const bool wakes = !ended_ && looked_at_ != kNever && protocol_->IsMissed(surroundings_->now() - looked_at_);
  return wakes ? Uids{process_.uid} : unheard_;
}

void SimulatedWorld::Leave() {
  if (ended_) return;
  protocol_->GiveUpWaiting(surroundings_->now(), &effects_);
  CarryOut();
  ended_ = true;
  surroundings_->life(process_.uid, epoch_).left = true;
}

void SimulatedWorld::Abort() {
  if (ended_) return;
  protocol_->Abort(Status::PeerLost("the world has ended"), &effects_);
  CarryOut();
  ended_ = true;
}

// ---- what comes ----

void SimulatedWorld::Receive(Message* message) {
  judge_->Took(message->epoch, epoch_);
  if (ended_) return;
  ++arrivals_[message->from];
  if (message->kind == Message::kGift) {
    arrived_[message->name][message->from] = message->gift;
    return FinishResults();
  }
  Frame frame;
  if (!Frame::Decode(message->bytes, &frame)) return judge_->Violate("a frame cannot be decoded");
  const auto from = std::find_if(members_.begin(), members_.end(),
                                 [&](const Member& member) { return member.process.uid == message->from; });
  protocol_->Arrived(surroundings_->now(), static_cast<int>(from - members_.begin()), std::move(frame), &effects_);
  CarryOut();
}

void SimulatedWorld::Step() {
  if (ended_) return;
  const std::string& notice = surroundings_->notice(process_.host, epoch_);
  if (!notice.empty()) protocol_->Abort(Status::PeerLost(notice), &effects_);
  CarryOut();
  LookForTheDead();
  for (bool moved = true; moved && !ended_;) {
    moved = protocol_->Tick(surroundings_->now(), &effects_);
    CarryOut();
  }
}

void SimulatedWorld::FinishResults() {
  while (!batches_.empty() && !ended_) {
    const effect::Execute& batch = batches_.front();
    for (const Response& response : batch.responses)
      if (!Complete(response.request.name)) return;
    std::vector<std::string> names;
    for (const Response& response : batch.responses) names.push_back(response.request.name);
    batches_.pop_front();
    for (const std::string& name : names) {
      results_[name] = std::move(arrived_[name]);
      arrived_.erase(name);
    }
    protocol_->BatchFinished(surroundings_->now(), 0, &effects_);
    CarryOut();
  }
}

// A broadcast needs the root's alone.
bool SimulatedWorld::Complete(const std::string& name) const {
  const auto found = arrived_.find(name);
  if (found == arrived_.end()) return false;
  if (name == kStateName) return found->second.count(members_[0].process.uid) > 0;
  return found->second.size() == members_.size();
}

// ---- liveness ----

void SimulatedWorld::LookForTheDead() {
  if (ended_ || surroundings_->now() < protocol_->next_look()) return;
  protocol_->Look(surroundings_->now(), Signs(), &effects_);
  unheard_ = UidsOf(protocol_->Unheard(surroundings_->now()));
  looked_at_ = surroundings_->now();
  CarryOut();
}

SignsOfLife SimulatedWorld::Signs() const {
  SignsOfLife signs(members_.size());
  for (size_t rank = 0; rank < signs.size(); ++rank) {
    const Process& process = members_[rank].process;
    const auto arrivals = arrivals_.find(process.uid);
    if (process.host == process_.host) {
      const Life& life = surroundings_->life(process.uid, epoch_);
      signs[rank] = {life.left, !life.left && surroundings_->has_died(process.uid), life.beats};
    } else if (arrivals != arrivals_.end()) {
      signs[rank].count = arrivals->second;
    }
  }
  return signs;
}

// ---- what the protocol decides ----

void SimulatedWorld::CarryOut() {
  while (!effects_.empty()) {
    RankEffects effects;
    effects.swap(effects_);
    for (RankEffect& effect : effects) std::visit([this](auto& what) { Do(what); }, effect);
  }
}

void SimulatedWorld::Do(rank_effect::Send& send) {
  if (ended_) return;
  Message message = Of(Message::kFrame);
  message.bytes = send.frame.Encode();
  surroundings_->Send(process_.uid, members_[static_cast<size_t>(send.rank)].process.uid, std::move(message));
}

void SimulatedWorld::Do(rank_effect::Start& start) {
  if (ended_ || protocol_->aborted()) return;
  batches_.push_back(start.batch);
  for (const Response& response : start.batch.responses) {
    const std::string& name = response.request.name;
    const auto given = given_.find(name);
    if (given == given_.end()) return judge_->Violate("an operation is carried out of which the input is gone");
    Message message = Of(Message::kGift);
    message.name = name;
    message.gift = given->second;
    SendToAll(message);
    arrived_[name][process_.uid] = given->second;
    given_.erase(given);
  }
  FinishResults();
}

void SimulatedWorld::Do(rank_effect::Fail& fail) {
  const bool is_of_a_peer = fail.status.code() == StatusCode::kPeerLost || fail.status.code() == StatusCode::kClosed;
  const bool waited = fail.status.code() == StatusCode::kTimeout;
  if (!fail.missing.empty()) missing_ = UidsOf(fail.missing);
  if (!ended_ && !is_of_a_peer && !waited) judge_->Violate("an operation fails: " + fail.status.message());
  failed_.insert(fail.name);
}

void SimulatedWorld::Do(rank_effect::Beat&) { ++surroundings_->life(process_.uid, epoch_).beats; }

void SimulatedWorld::Do(rank_effect::NoteCause& note) {
  surroundings_->Trace(process_.uid, "ends the epoch: " + note.cause.message());
  std::string& notice = surroundings_->notice(process_.host, epoch_);
  if (notice.empty()) notice = note.cause.message();
  protocol_->CauseNoted(Status::PeerLost(notice), &effects_);
}

void SimulatedWorld::Do(rank_effect::Wake& wake) {
  surroundings_->Call(members_[static_cast<size_t>(wake.rank)].process.uid, kMillisecond / 10);
}

void SimulatedWorld::SendToAll(const Message& message) {
  for (const Member& member : members_)
    if (member.process.uid != process_.uid) surroundings_->Send(process_.uid, member.process.uid, message);
}

}  // namespace elastic
}  // namespace ringtrain
