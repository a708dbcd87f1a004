#include "agree/pairing.h"

#include <algorithm>
#include <utility>

namespace ringtrain {
namespace {

Frame Make(FrameType type, uint64_t count = 0) {
  Frame frame;
  frame.type = type;
  frame.count = count;
  return frame;
}

std::string RankText(int rank) { return "rank " + std::to_string(rank); }

Status NobodySends(const PairRequest& request) {
  const std::string who = request.other == kAnyRank ? "every other rank" : RankText(request.other);
  return Status::Closed(request.subject + ": " + who +
                        " has called shutdown(), and sends no more. Is there a send for each receive?");
}

Status NobodyReceives(const PairRequest& request) {
  return Status::Closed(request.subject + ": " + RankText(request.other) +
                        " has called shutdown(), and receives no more. Is there a receive for each send?");
}

// The first of a queue, which is there as long as it has any: programs count their tags on.
template <typename Queues>
auto TakeFirst(Queues* queues, typename Queues::iterator queue) {
  auto first = std::move(queue->second.front());
  queue->second.pop_front();
  if (queue->second.empty()) queues->erase(queue);
  return first;
}

}  // namespace

void Pairing::Send(Nanoseconds now, PairRequest request, const char* bytes, PairEffects* effects) {
  if (gone_.count(request.other) > 0) {
    effects->push_back(pair_effect::Fail{request.number, NobodyReceives(request)});
    return;
  }
  Frame offer = Make(FrameType::kOffer, request.number);
  offer.process_set = request.process_set;
  offer.tag = request.tag;
  offer.tensor = request.tensor;
  const size_t size = request.tensor.bytes();
  size_t& untaken = untaken_[request.other];
  offer.flag = size <= kMostInOffer && untaken + size <= kMostUntaken;
  if (offer.flag) {
    untaken += size;
    offer.text.assign(bytes, size);
    effects->push_back(pair_effect::Tell{request.other, std::move(offer)});
    effects->push_back(pair_effect::Sent{request.number});
    return;
  }
  effects->push_back(pair_effect::Tell{request.other, std::move(offer)});
  const uint64_t number = request.number;
  offered_[number] = {std::move(request), now, ++order_};
  LookAgain(now + kKeepAfter);
}

void Pairing::Receive(Nanoseconds now, PairRequest request, PairEffects* effects) {
  Waiting receive{std::move(request), now, ++order_};
  if (Offer offer; TakeOfferFor(receive.request, &offer)) return Match(receive, std::move(offer), effects);
  if (!MayCome(receive.request)) {
    effects->push_back(pair_effect::Fail{receive.request.number, NobodySends(receive.request)});
    return;
  }
  const Place place{receive.request.process_set, receive.request.tag, receive.request.other};
  posted_[place].push_back(std::move(receive));
  LookAgain(now + kAskAfter);
}

// Of several ranks' offers the one that came first.
bool Pairing::TakeOfferFor(const PairRequest& request, Offer* offer) {
  auto first = offers_.end();
  const auto look = [&](int from) {
    const auto found = offers_.find({request.process_set, request.tag, from});
    if (found == offers_.end()) return;
    if (first == offers_.end() || found->second.front().order < first->second.front().order) first = found;
  };
  if (request.other != kAnyRank)
    look(request.other);
  else
    for (int from : request.members) look(from);
  if (first == offers_.end()) return false;
  *offer = TakeFirst(&offers_, first);
  return true;
}

bool Pairing::TakeReceiveFor(const Offer& offer, Waiting* receive) {
  const auto place_of = [&](int sender) { return posted_.find({offer.frame.process_set, offer.frame.tag, sender}); };
  const auto named = place_of(offer.from), any = place_of(kAnyRank);
  if (named == posted_.end() && any == posted_.end()) return false;
  const bool takes_any =
      named == posted_.end() || (any != posted_.end() && any->second.front().order < named->second.front().order);
  *receive = TakeFirst(&posted_, takes_any ? any : named);
  return true;
}

void Pairing::Arrived(int from, Frame frame, PairEffects* effects) {
  switch (frame.type) {
    case FrameType::kOffer: {
      Offer offer{from, std::move(frame), ++order_};
      if (Waiting receive; TakeReceiveFor(offer, &receive)) return Match(receive, std::move(offer), effects);
      offers_[{offer.frame.process_set, offer.frame.tag, from}].push_back(std::move(offer));
      return;
    }
    case FrameType::kAccept:
      if (offered_.erase(frame.count) > 0) effects->push_back(pair_effect::StartSend{frame.count, from});
      return;
    case FrameType::kDecline:
      if (offered_.erase(frame.count) > 0)
        effects->push_back(pair_effect::Fail{frame.count, Status::Mismatch(frame.text)});
      return;
    case FrameType::kTaken:
      untaken_[from] -= std::min<size_t>(untaken_[from], frame.count);
      return;
    case FrameType::kAwait:
      if (leaves_)
        effects->push_back(pair_effect::Tell{from, Make(FrameType::kGone)});
      else
        askers_.insert(from);
      return;
    default:
      gone_.insert(from);
      FailWhatCannotCome(from, effects);
  }
}

void Pairing::Match(const Waiting& receive, Offer offer, PairEffects* effects) {
  const PairRequest& request = receive.request;
  const TensorSpec &given = offer.frame.tensor, &wanted = request.tensor;
  if (given.dtype == wanted.dtype && given.elements() == wanted.elements()) return Take(receive, &offer, effects);
  const std::string text = request.subject + ": the tensor must be of one dtype and as large on both ranks, but " +
                           RankText(offer.from) + " sends " + given.Text() + ", where room is for " + wanted.Text() +
                           " (tag " + std::to_string(request.tag) + "). Are sends and receives in the same order?";
  effects->push_back(pair_effect::Fail{request.number, Status::Mismatch(text)});
  Frame decline = Make(FrameType::kDecline, offer.frame.count);
  decline.text = text;
  if (!offer.frame.flag) effects->push_back(pair_effect::Tell{offer.from, std::move(decline)});
}

void Pairing::Take(const Waiting& receive, Offer* offer, PairEffects* effects) {
  const uint64_t number = receive.request.number;
  const int from = offer->from;
  if (!offer->frame.flag) {
    effects->push_back(pair_effect::Tell{from, Make(FrameType::kAccept, offer->frame.count)});
    effects->push_back(pair_effect::StartReceive{number, from});
    return;
  }
  size_t& taken = taken_[from];
  taken += offer->frame.text.size();
  effects->push_back(pair_effect::Deliver{number, from, std::move(offer->frame.text)});
  if (taken < kMostUntaken / 2) return;
  effects->push_back(pair_effect::Tell{from, Make(FrameType::kTaken, std::exchange(taken, 0))});
}

// ---- what waits for long ----

// A send is kept first, since all that wait may do so for each other, and asked for later.
void Pairing::Tick(Nanoseconds now, PairEffects* effects) {
  if (now < next_timer_) return;
  next_timer_ = kNever;
  const auto look = [&](Waiting* waiting, bool sends) {
    if (sends && !waiting->kept) {
      if (now < waiting->since + kKeepAfter) return LookAgain(waiting->since + kKeepAfter);
      waiting->kept = true;
      effects->push_back(pair_effect::Keep{waiting->request.number});
    }
    if (waiting->asked) return;
    if (now < waiting->since + kAskAfter) return LookAgain(waiting->since + kAskAfter);
    AskFor(waiting, effects);
  };
  for (auto& [number, send] : offered_) look(&send, true);
  for (auto& [place, receives] : posted_)
    for (Waiting& receive : receives) look(&receive, false);
}

void Pairing::AskFor(Waiting* waiting, PairEffects* effects) {
  waiting->asked = true;
  const PairRequest& request = waiting->request;
  if (request.other != kAnyRank) effects->push_back(pair_effect::Tell{request.other, Make(FrameType::kAwait)});
  if (request.other == kAnyRank)
    for (int member : request.members) effects->push_back(pair_effect::Tell{member, Make(FrameType::kAwait)});
}

void Pairing::Leave(PairEffects* effects) {
  leaves_ = true;
  for (int asker : std::exchange(askers_, {})) effects->push_back(pair_effect::Tell{asker, Make(FrameType::kGone)});
}

bool Pairing::MayCome(const PairRequest& request) const {
  if (request.other != kAnyRank) return gone_.count(request.other) == 0;
  return std::any_of(request.members.begin(), request.members.end(),
                     [&](int member) { return gone_.count(member) == 0; });
}

void Pairing::FailWhatCannotCome(int gone, PairEffects* effects) {
  for (auto send = offered_.begin(); send != offered_.end();) {
    if (send->second.request.other != gone) {
      ++send;
      continue;
    }
    effects->push_back(pair_effect::Fail{send->first, NobodyReceives(send->second.request)});
    send = offered_.erase(send);
  }
  for (auto posted = posted_.begin(); posted != posted_.end();) {
    const std::deque<Waiting>& receives = posted->second;
    if (MayCome(receives.front().request)) {
      ++posted;
      continue;
    }
    for (const Waiting& receive : receives)
      effects->push_back(pair_effect::Fail{receive.request.number, NobodySends(receive.request)});
    posted = posted_.erase(posted);
  }
}

}  // namespace ringtrain
