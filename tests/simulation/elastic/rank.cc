#include "rank.h"

#include <algorithm>
#include <utility>

namespace ringtrain {
namespace elastic {
namespace {

constexpr Nanoseconds kToConnect = 6 * kSecond;
constexpr int kMostFailures = 3;
constexpr char kStandingsName[] = "standings", kPlacesName[] = "places", kWholeName[] = "whole", kPauseName[] = "pause";
constexpr char kAloneName[] = "of one rank alone";

SamplePlan SamplesOf(const Plan& plan) { return {plan.cut, plan.positions, plan.batch, false}; }

// What ranks of a world decide of their speeds, which change about every third window: the same on all of them, since
// it follows from what all know. Each third share is equal.
std::vector<int64_t> PartsOf(int64_t world, int64_t released, int32_t size) {
  const int64_t speeds = world + released / 3;
  std::vector<int64_t> parts;
  for (int64_t place = 0; speeds % 3 != 0 && place < size; ++place) parts.push_back((place * place + speeds) % 4);
  return parts;
}

// Of a third of the jobs: what positions cost.
std::vector<int64_t> CostsOf(const Plan& plan) {
  if (plan.seed % 3 != 0) return {};
  return {1, 2, 5, 3, 3, 5, 2};
}

}  // namespace

SimulatedRank::SimulatedRank(const Plan& plan, Process process, const std::string& program, Judge* judge,
                             Surroundings* surroundings)
    : plan_(plan),
      process_(process),
      program_(program),
      fits_(program != kOtherValues),
      judge_(judge),
      surroundings_(surroundings),
      random_({plan.seed, 3, process.uid.low}),
      membership_(process, program == kOtherValues ? kProgram : program),
      steps_(false),
      samples_(SamplesOf(plan), 0, {}) {
  samples_.Cost(CostsOf(plan));
}

void SimulatedRank::Begin() {
  membership_.Begin(&actions_);
  Step();
}

void SimulatedRank::Hear(const ControlFrame& frame) {
  NoteUnheard();
  membership_.Arrived(frame, &actions_);
  Step();
}

void SimulatedRank::Step() {
  if (over_) return;
  if (surroundings_->now() >= armed_) armed_ = kNever;
  CarryOut();
  LookAtTheConnection();
  for (bool moves = true; moves && !over_;) {
    for (SimulatedWorld* world : Worlds()) world->Step();
    moves = Program();
  }
  if (!over_) Arm();
}

std::vector<SimulatedWorld*> SimulatedRank::Worlds() const {
  std::vector<SimulatedWorld*> worlds;
  for (SimulatedWorld* world : {present_.get(), opened_.get(), next_.get()})
    if (world != nullptr) worlds.push_back(world);
  return worlds;
}

void SimulatedRank::Arm() {
  Nanoseconds next = std::min(std::max(program_at_, hangs_until_), connect_by_);
  for (const SimulatedWorld* world : Worlds()) next = std::min(next, world->next_look());
  if (next == kNever || next >= armed_) return;
  armed_ = next;
  surroundings_->Call(process_.uid, std::max<Nanoseconds>(next - surroundings_->now(), 1));
}

// ---- the program ----

// Whether it has gone on.
bool SimulatedRank::Program() {
  if (surroundings_->now() < hangs_until_) return false;
  const Wait wait = wait_;
  const Nanoseconds at = program_at_;
  Go();
  return wait != wait_ || at != program_at_;
}

void SimulatedRank::Go() {
  const auto result = [&](const char* name) { return present_ ? present_->ResultOf(name) : nullptr; };
  switch (wait_) {
    case Wait::kWorld:
      return next_ ? TakeWorld() : void();
    case Wait::kStandings:
      if (Fails(kStandingsName)) return GoOn();
      if (const Gifts* told = result(kStandingsName)) {
        if (Refuses(*told)) return;
        std::vector<Standing> standings;
        for (const Member& member : present_->members()) standings.push_back(told->at(member.process.uid).standing);
        if (!steps_.Hear(standings)) judge_->Violate("E2: ranks have standings that cannot be");
        if (!steps_.place_in_dealing()) return Settle({});
        Gift gift;
        gift.place = *steps_.place_in_dealing();
        present_->Submit(kPlacesName, gift);
        wait_ = Wait::kPlaces;
      }
      return;
    case Wait::kPlaces:
      if (Fails(kPlacesName)) return GoOn();
      if (const Gifts* told = result(kPlacesName)) {
        std::vector<int32_t> places;
        for (const Member& member : present_->members()) places.push_back(told->at(member.process.uid).place);
        Settle(places);
      }
      return;
    case Wait::kState:
      if (Fails(kStateName)) return GoOn();
      if (const Gifts* told = result(kStateName)) {
        TakeState(told->at(present_->members()[0].process.uid).progress);
        CarryOutSteps();
      }
      return;
    case Wait::kTime:
      if (surroundings_->now() < program_at_) return;
      program_at_ = kNever;
      if (std::exchange(goes_another_way_, false)) return WaitAlone();
      return window_ ? Give() : BeginWindow();
    case Wait::kResults:
      return Hold();
    case Wait::kWhole:
      return Agree();
    case Wait::kPause:
      if (!Fails(kPauseName) && result(kPauseName) == nullptr) return;
      if (result(kPauseName) != nullptr) membership_.Admits(true);
      return GoOn();
    case Wait::kAlone:
      return AwaitAlone();
    case Wait::kNothing:
      return;
  }
}

bool SimulatedRank::Fails(const std::string& name) { return !present_ || present_->has_failed(name); }

void SimulatedRank::ComputeFor(Nanoseconds longest) {
  wait_ = Wait::kTime;
  program_at_ = surroundings_->now() + 1 + random_.Between(0, longest);
}

void SimulatedRank::WaitAlone() {
  if (present_) present_->Submit(kAloneName, {});
  wait_ = Wait::kAlone;
}

// The error of one that fails ends most programs, and some go on.
void SimulatedRank::AwaitAlone() {
  const bool fails = Fails(kAloneName);
  if (!fails && present_->ResultOf(kAloneName) == nullptr) return;
  if (fails) {
    TellSuspects();
    CarryOut();
  } else {
    present_->Forget(kAloneName);
  }
  if (over_) return;
  fails && !random_.OneIn(4) ? End(1) : ComputeFor(plan_.window / 4);
}

// Between two windows: leaves the world if all have agreed to, or begins the next window.
void SimulatedRank::BeginWindow() {
  if (agreed_to_pause_ && steps_.stage() == Stage::kIdle) {
    present_->Submit(kPauseName, {});
    wait_ = Wait::kPause;
    return;
  }
  window_.emplace();
  window_->is_last = done_ == plan_.steps;
  const std::string step = std::to_string(done_ + 1);
  if (window_->is_last) {
    window_->parts.push_back({Part::kLast, {}, {}, {}, {}, false});
  } else if (plan_.has_metric(done_) && !metric_done_) {
    window_->parts.push_back({Part::kNothing, {"metric"}, {}, {}, {}, false});
    window_->parts.push_back({Part::kLast, {}, {}, {}, {}, false});
  } else {
    window_->counts = true;
    if (plan_.has_statistics(done_)) window_->parts.push_back({Part::kNothing, {"statistics"}, {}, {}, {}, false});
    std::vector<std::string> names;
    for (int operation = 0; operation < plan_.operations; ++operation)
      names.push_back("gradient " + std::to_string(operation));
    if (plan_.has_two_parts(done_)) {
      window_->parts.push_back({Part::kSome, {names.back()}, {}, {}, {}, false});
      names.pop_back();
    }
    window_->parts.push_back({Part::kStep, names, {}, {}, {}, false});
    Draw();
  }
  for (OpenPart& part : window_->parts) part.to_give = part.names;
  ComputeFor(plan_.window / 4);
}

void SimulatedRank::Draw() {
  steps_.Begin();
  for (int draw = 0; draw < plan_.draws; ++draw) {
    while (samples_.drawn() - samples_.taken() < 1 || random_.OneIn(4)) {
      const int64_t drawn = samples_.drawn();
      const std::vector<int64_t> positions = samples_.DrawAhead();
      ahead_.push_back(positions);
      if (samples_.drawn() == drawn) return judge_->Violate("there are no more samples");
    }
    samples_.Take(1);
  }
}

// One operation of the part after the other, in an order of its own, as a backward pass does.
void SimulatedRank::Give() {
  OpenPart& part = window_->parts.front();
  if (part.to_give.empty()) return EndPart();
  const size_t place = random_.Below(part.to_give.size());
  const std::string name = part.to_give[place];
  part.to_give.erase(part.to_give.begin() + static_cast<std::ptrdiff_t>(place));
  part.given[name] = ContributionOf(name);
  if (present_ && !present_->has_ended()) {
    Gift gift;
    gift.contribution = part.given[name];
    present_->Submit(name, gift);
  }
  ComputeFor(2 * plan_.window / (plan_.operations + 1));
}

void SimulatedRank::EndPart() {
  OpenPart& part = window_->parts.front();
  steps_.BeginPart();
  part.asked = true;
  wait_ = Wait::kResults;
}

void SimulatedRank::Hold() {
  OpenPart& part = window_->parts.front();
  for (const std::string& name : part.names)
    if (Fails(name)) return GoOn();
  if (Fails(kWholeName)) return GoOn();
  Sums held;
  for (const std::string& name : part.names) {
    const Gifts* gifts = present_->ResultOf(name);
    if (gifts == nullptr) return;
    Sum& sum = held[name];
    sum.epoch = present_->epoch();
    for (const auto& [uid, gift] : *gifts) sum.parts[uid] = gift.contribution;
  }
  part.held = std::move(held);
  steps_.Hold(part.part);
  judge_->Holds(process_.uid);
  Gift gift;
  gift.pauses = wants_pause_;
  present_->Submit(kWholeName, gift);
  wait_ = Wait::kWhole;
}

void SimulatedRank::Agree() {
  if (Fails(kWholeName)) return GoOn();
  const Gifts* told = present_->ResultOf(kWholeName);
  if (told == nullptr) return;
  agreed_to_pause_ = std::any_of(told->begin(), told->end(), [](const auto& each) { return each.second.pauses; });
  for (const std::string& name : window_->parts.front().names) present_->Forget(name);
  present_->Forget(kWholeName);
  StepEffects effects;
  steps_.Release(&effects);
  judge_->Settled(process_.uid);
  deeds_.assign(effects.begin(), effects.end());
  settles_ = false;
  PartReleased();
  CarryOutSteps();
}

// Its results are used.
void SimulatedRank::PartReleased() {
  if (!window_ || window_->parts.empty()) return judge_->Violate("a part is released that nobody has begun");
  OpenPart part = std::move(window_->parts.front());
  window_->parts.pop_front();
  judge_->Used(process_.uid, done_, window_->counts, window_->parts_released++, part.held);
  if (window_->counts && window_->sums.empty() && part.part != Part::kNothing) window_->sums = part.held;
}

// ---- from world to world ----

// Of the world that this rank is a member of, which the program may not have taken yet.
void SimulatedRank::NoteUnheard() {
  const SimulatedWorld* world = next_ ? next_.get() : goes_on_ ? present_.get() : nullptr;
  if (world != nullptr) membership_.Unheard(world->unheard());
}

void SimulatedRank::TellSuspects() {
  if (!present_ || !goes_on_) return;
  membership_.Suspect(present_->Silent(), &actions_);
  membership_.Missing(present_->missing(), &actions_);
}

// Leaves the world, if nobody has ended it, and takes the next one.
void SimulatedRank::GoOn() {
  NoteUnheard();
  TellSuspects();
  if (present_) present_->Leave();
  present_.reset();
  wait_ = Wait::kWorld;
  deeds_.clear();
  if (!next_) membership_.WorldEnded(&actions_);
  CarryOut();
}

void SimulatedRank::TakeWorld() {
  present_ = std::move(next_);
  goes_on_ = true;
  agreed_to_pause_ = false;
  const auto number = static_cast<int64_t>(present_->epoch().count);
  members_in_[number] = present_->members();
  steps_.EnterWorld(number, static_cast<int32_t>(present_->members().size()), present_->rank());
  Gift gift;
  gift.standing = steps_.standing(false);
  judge_->Stands(process_.uid, gift.standing);
  gift.fits = fits_;
  present_->Submit(kStandingsName, gift);
  wait_ = Wait::kStandings;
}

// Whether some have joined with values that do not fit. They end, or do not; the others leave the world at once.
bool SimulatedRank::Refuses(const Gifts& told) {
  const auto holds = [](const auto& each) { return each.second.standing.holds_state; };
  Uids refused;
  if (std::any_of(told.begin(), told.end(), holds))
    for (const auto& [uid, gift] : told)
      if (!gift.fits && !gift.standing.holds_state) refused.push_back(uid);
  fits_ |= refused.empty();  // in a first world it trains as the others do
  if (refused.empty()) return false;
  if (fits_) {
    membership_.Refuse(refused, &actions_);
    GoOn();
  } else if (random_.OneIn(2)) {
    wait_ = Wait::kNothing;
  } else {
    End(1);
  }
  return true;
}

void SimulatedRank::Settle(const std::vector<int32_t>& places) {
  const int64_t released = steps_.released();
  StepEffects effects;
  steps_.Settle(places, &effects);
  judge_->Settled(process_.uid);
  judge_->Stands(process_.uid, steps_.standing(false));
  deeds_.assign(effects.begin(), effects.end());
  settles_ = true;
  if (steps_.released() > released) PartReleased();
  CarryOutSteps();
}

// What has been decided, one after the other; goes on where the state has come.
void SimulatedRank::CarryOutSteps() {
  while (!deeds_.empty()) {
    const StepEffect deed = deeds_.front();
    deeds_.pop_front();
    if (const auto* finish = std::get_if<step_effect::Finish>(&deed)) {
      Finish(finish->contributors);
    } else if (const auto* deal = std::get_if<step_effect::Deal>(&deed)) {
      samples_.Deal(deal->size, deal->place);
      samples_.Share(PartsOf(deal->world, steps_.released(), deal->size));
      if (samples_.drawn() == 0) ahead_.clear();
      dealt_in_ = steps_.standing(false).dealt_in;
    } else if (std::holds_alternative<step_effect::TakeState>(deed)) {
      Gift gift;
      gift.progress = progress();
      if (present_->rank() == 0) judge_->Gave(process_.uid);
      present_->Submit(kStateName, gift);
      wait_ = Wait::kState;
      return;
    }
  }
  Resume();
}

// Behind a settlement, or a release.
void SimulatedRank::Resume() {
  if (settles_) {
    if (!goes_on_) return GoOn();
    membership_.Admits(false);
    judge_->Ran(surroundings_->now(), process_.uid, present_->epoch(), present_->members(), progress());
    judge_->HasProgram(present_->epoch(), fits_ && program_ == kOtherValues ? kProgram : program_);
    surroundings_->Trace(process_.uid, "goes on in epoch " + std::to_string(present_->epoch().count) + " behind step " +
                                           std::to_string(done_) + " and part " + std::to_string(steps_.released()));
  }
  if (!window_ || window_->parts.empty()) {
    if (window_ && window_->is_last) {
      wait_ = Wait::kNothing;
      judge_->Finished(process_.uid, progress());
      membership_.Finished(&actions_);
      return CarryOut();
    }
    window_.reset();
    return ComputeFor(plan_.window / 4);
  }
  OpenPart& part = window_->parts.front();
  if (!part.asked) return ComputeFor(plan_.window / 4);
  // The kept inputs, once more.
  for (auto& [name, contribution] : part.given) {
    Gift gift;
    gift.contribution = contribution = ContributionOf(name);
    present_->Submit(name, gift);
  }
  wait_ = Wait::kResults;
}

void SimulatedRank::Finish(const Contributors& contributors) {
  if (!window_) return judge_->Violate("a window ends that nobody has begun");
  const Window& window = *window_;
  const int64_t left_ahead = samples_.drawn() - samples_.taken();
  samples_.Release(contributors);
  const int64_t drawn_ahead = samples_.drawn() - samples_.taken();
  if (drawn_ahead > std::min(left_ahead, static_cast<int64_t>(ahead_.size())))
    return judge_->Violate("what was drawn ahead is more than was left");
  ahead_.erase(ahead_.begin(), ahead_.end() - static_cast<std::ptrdiff_t>(drawn_ahead));
  if (window.counts) {
    metric_done_ = false;
    judge_->Released(process_.uid, present_->epoch(), settles_, ++done_, UidsOf(contributors), window.sums);
  } else if (!window.is_last) {
    metric_done_ = true;
  }
}

void SimulatedRank::TakeState(const Progress& progress) {
  done_ = progress.steps;
  metric_done_ = progress.metric_done;
  samples_ = Samples(SamplesOf(plan_), progress.next, progress.given_back);
  samples_.Cost(CostsOf(plan_));
  ahead_.clear();
  const auto size = static_cast<int32_t>(present_->members().size());
  samples_.Deal(size, present_->rank());
  steps_.TookState();
  samples_.Share(PartsOf(static_cast<int64_t>(present_->epoch().count), steps_.released(), size));
  membership_.GotState();
}

Contribution SimulatedRank::ContributionOf(const std::string& name) const {
  Contribution contribution{process_.uid, done_ + 1, {}, 1};
  if (!window_->counts || name == "statistics") return contribution;
  for (int64_t draw = 0; draw < samples_.taken(); ++draw)
    for (int64_t position : ahead_[static_cast<size_t>(draw)]) contribution.samples.push_back(position);
  if (plan_.cut == Cut::kPositions) return contribution;
  contribution.weight = samples_.Weight(steps_.contributors());
  return contribution;
}

Progress SimulatedRank::progress() const { return {done_, metric_done_, samples_.next(), samples_.given_back()}; }

// Of the dealing that the window had.
std::vector<Uid> SimulatedRank::UidsOf(const Contributors& contributors) const {
  const std::vector<Member>& members = members_in_.at(dealt_in_);
  std::vector<Uid> uids;
  for (size_t place = 0; place < members.size(); ++place)
    if (!contributors || std::count(contributors->begin(), contributors->end(), static_cast<int32_t>(place)) > 0)
      uids.push_back(members[place].process.uid);
  return uids;
}

// ---- the thread that listens ----

void SimulatedRank::Connect(const ControlFrame& form) {
  form_ = form;
  answered_.clear();
  answered_[process_.uid] = true;
  connect_by_ = surroundings_->now() + kToConnect;
  for (const Member& member : form.members)
    if (member.process.uid != process_.uid)
      surroundings_->Send(process_.uid, member.process.uid, Of(Message::kHello, form.epoch));
  if (answered_.size() == form.members.size()) return HaveConnected(true);
  TakeKept();
}

void SimulatedRank::Answered(const Message& message) {
  answered_[message.from] = true;
  if (answered_.size() == form_->members.size()) HaveConnected(true);
}

void SimulatedRank::HaveConnected(bool well) {
  const ControlFrame form = *std::exchange(form_, std::nullopt);
  connect_by_ = kNever;
  const bool has_joiners =
      std::any_of(form.members.begin(), form.members.end(), [](const Member& member) { return member.joins; });
  if (well) {
    failures_ = 0;
    opened_ = std::make_unique<SimulatedWorld>(plan_, process_, form, judge_, surroundings_);
  } else if (!has_joiners) {
    ++failures_;
  }
  membership_.Connected(form.epoch.count, well, &actions_);
  CarryOut();
  if (failures_ >= kMostFailures) return End(1);
  TakeKept();
}

void SimulatedRank::LookAtTheConnection() {
  if (form_ && surroundings_->now() >= connect_by_) HaveConnected(false);
}

void SimulatedRank::Receive(Message message) {
  if (over_) return;
  kept_.push_back(std::move(message));
  TakeKept();
  Step();
}

// What belongs to a world that is open, or is being connected; the rest waits, unless it is of the past. One that has
// opened a world may still be asked by those who have not.
void SimulatedRank::TakeKept() {
  std::deque<Message> kept;
  kept.swap(kept_);
  for (Message& message : kept) {
    if (over_) return;
    SimulatedWorld* world = nullptr;
    for (SimulatedWorld* each : Worlds())
      if (each->epoch() == message.epoch) world = each;
    const bool connecting = form_ && form_->epoch == message.epoch;
    if (message.kind == Message::kHello && (world != nullptr || connecting)) {
      surroundings_->Send(process_.uid, message.from, Of(Message::kHelloAnswer, message.epoch));
    } else if (message.kind == Message::kHelloAnswer && connecting) {
      Answered(message);
    } else if (world != nullptr) {
      if (message.kind == Message::kFrame || message.kind == Message::kGift) world->Receive(&message);
    } else if (connecting || newest_ < message.epoch) {
      kept_.push_back(std::move(message));
    }
  }
}

void SimulatedRank::CarryOut() {
  while (!actions_.empty() && !over_) {
    MembershipActions actions;
    actions.swap(actions_);
    for (MembershipAction& action : actions)
      if (!over_) std::visit([this](auto& what) { Do(what); }, action);
  }
}

void SimulatedRank::Do(membership_action::Send& send) {
  if (send.frame.type == ControlType::kReport) judge_->Reported(send.frame.Encode().size());
  surroundings_->TellAgent(process_.uid, send.frame);
}

void SimulatedRank::Do(membership_action::Abandon&) {
  form_.reset();
  connect_by_ = kNever;
  goes_on_ = false;
  for (SimulatedWorld* world : Worlds()) {
    if (newest_ < world->epoch()) newest_ = world->epoch();
    world->Abort();
  }
  opened_.reset();
  next_.reset();
}

void SimulatedRank::Do(membership_action::Run&) {
  next_ = std::move(opened_);
  newest_ = next_->epoch();
  wants_pause_ = false;
}

void SimulatedRank::Do(membership_action::Depart&) { End(0); }

void SimulatedRank::Do(membership_action::Fence& fence) {
  surroundings_->Trace(process_.uid, "is fenced: " + fence.cause);
  End(1);
}

void SimulatedRank::End(int exit_code) {
  for (SimulatedWorld* world : Worlds())
    if (exit_code == 0) world->Leave();
  over_ = true;
  surroundings_->Exit(process_.uid, exit_code);
}

}  // namespace elastic
}  // namespace ringtrain
