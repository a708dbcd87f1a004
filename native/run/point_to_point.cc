#include "run/point_to_point.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "collectives/group.h"
#include "world/placement.h"

namespace ringtrain {
namespace {

// Far from the ids of process sets, whose windows lie in the same file.
constexpr int kFirstWindow = 1 << 30;

}  // namespace

PointToPoint::PointToPoint(const World& world, const Books& books, Wire& wire, HostMemory* memory)
    : world_(world), books_(books), wire_(wire), memory_(memory) {}

void PointToPoint::Submitted(std::shared_ptr<Submission> submission, std::vector<int> members) {
  const Request& request = submission->request;
  PairRequest wanted{++numbers_,         request.root,      submission->process_set, request.splits[0],
                     request.tensors[0], request.Subject(), std::move(members)};
  wanted.members.erase(std::find(wanted.members.begin(), wanted.members.end(), world_.rank));
  const bool sends = request.operation == Operation::kSend;
  char* const data =
      sends ? static_cast<char*>(const_cast<void*>(submission->inputs[0])) : static_cast<char*>(submission->outputs[0]);
  transfers_[numbers_] = {std::move(submission), nullptr, data};
  if (sends)
    pairing_.Send(Now(), std::move(wanted), data, &effects_);
  else
    pairing_.Receive(Now(), std::move(wanted), &effects_);
}

Status PointToPoint::Advance(bool* moved, std::vector<std::pair<int, Frame>>* frames) {
  frames_ = frames;
  if (pairing_.next_timer() <= Now()) pairing_.Tick(Now(), &effects_);
  for (PairEffect& effect : std::exchange(effects_, {})) {
    *moved = true;
    RT_TRY(std::visit([&](auto& what) { return CarryOut(what); }, effect));
  }
  std::vector<uint64_t> done;
  for (auto& [other, ends] : streams_)
    for (StreamEnd* end : {ends.out.get(), ends.in.get()})
      if (end != nullptr && end->busy()) RT_TRY(end->Advance(moved, &done));
  for (uint64_t number : done) {
    --under_way_;
    Finish(number, {});
  }
  return {};
}

void PointToPoint::Abandon() {
  streams_.clear();
  transfers_.clear();
  effects_.clear();
  pairing_ = Pairing();
  under_way_ = 0;
}

// ---- what the pairing decides ----

Status PointToPoint::CarryOut(pair_effect::Tell& tell) {
  frames_->emplace_back(tell.rank, std::move(tell.frame));
  return {};
}

Status PointToPoint::CarryOut(const pair_effect::StartSend& start) { return Start(start.send, start.to, true); }

Status PointToPoint::CarryOut(const pair_effect::StartReceive& start) {
  transfers_.at(start.receive).submission->handle->result = start.from;
  return Start(start.receive, start.from, false);
}

Status PointToPoint::CarryOut(const pair_effect::Deliver& deliver) {
  const Transfer& transfer = transfers_.at(deliver.receive);
  if (!deliver.bytes.empty()) std::memcpy(transfer.data, deliver.bytes.data(), deliver.bytes.size());
  transfer.submission->handle->result = deliver.from;
  Finish(deliver.receive, {});
  return {};
}

Status PointToPoint::CarryOut(const pair_effect::Sent& sent) {
  Finish(sent.send, {});
  return {};
}

// Without memory for it the submitter waits on.
Status PointToPoint::CarryOut(const pair_effect::Keep& keep) {
  const auto found = transfers_.find(keep.send);
  if (found == transfers_.end()) return {};
  Transfer& transfer = found->second;
  const size_t bytes = transfer.submission->request.bytes();
  transfer.kept.reset(new (std::nothrow) char[bytes]);
  if (transfer.kept == nullptr) return {};
  std::memcpy(transfer.kept.get(), transfer.data, bytes);
  transfer.data = transfer.kept.get();
  books_.table->Finish(transfer.submission, {});
  return {};
}

Status PointToPoint::CarryOut(const pair_effect::Fail& fail) {
  Finish(fail.number, fail.status);
  return {};
}

Status PointToPoint::Start(uint64_t number, int other, bool sends) {
  const Transfer& transfer = transfers_.at(number);
  const size_t bytes = transfer.submission->request.bytes();
  transfer.submission->started.store(Now(), std::memory_order_relaxed);
  if (bytes == 0) {
    Finish(number, {});
    return {};
  }
  Streams& streams = streams_[other];
  std::unique_ptr<StreamEnd>& stream = sends ? streams.out : streams.in;
  if (stream == nullptr) RT_TRY(OpenStream(other, sends, &stream));
  stream->Add({number, transfer.data, bytes});
  ++under_way_;
  return {};
}

Status PointToPoint::OpenStream(int other, bool sends, std::unique_ptr<StreamEnd>* stream) {
  std::vector<int> both = {std::min(world_.rank, other), std::max(world_.rank, other)};
  if (TopologyFor(world_, books_.options, both).host_count() > 1) {
    *stream = OpenWireStream(&wire_, other, Group::kPairTag, sends);
    return {};
  }
  const int mine = world_.local_rank_of[world_.rank], theirs = world_.local_rank_of[other];
  const int from = sends ? mine : theirs, to = sends ? theirs : mine;
  char* memory;
  const Status mapped =
      memory_->MapWindow(kFirstWindow + from * world_.local_size() + to, 2, sizeof(StreamMemory), &memory);
  if (!mapped.ok()) return {mapped.code(), "rank " + std::to_string(world_.rank) + ": " + mapped.message()};
  *stream =
      OpenSharedStream(reinterpret_cast<StreamMemory*>(memory), &memory_->doorbell(theirs), sends, books_.counters);
  return {};
}

void PointToPoint::Finish(uint64_t number, const Status& status) {
  const auto found = transfers_.find(number);
  if (found == transfers_.end()) return;
  const Transfer transfer = std::move(found->second);
  transfers_.erase(found);
  const Submission& submission = *transfer.submission;
  const auto bytes = static_cast<int64_t>(submission.request.bytes());
  if (status.ok()) {
    const Nanoseconds begin = submission.started.load(std::memory_order_relaxed), now = Now();
    books_.counters->Add(Counter::kOperations, 1);
    books_.counters->Add(Counter::kBytes, bytes);
    books_.traffic->Add({submission.request.operation, TrafficTable::SizeClass(bytes), 1, bytes, bytes,
                         begin > 0 ? now - begin : 0, (begin > 0 ? begin : now) - submission.submitted});
    if (books_.timeline->enabled())
      books_.timeline->Span(submission.request.Subject(), Text(submission.request.operation), submission.submitted, now,
                            bytes, "wire");
  }
  books_.table->Finish(transfer.submission, status);
}

}  // namespace ringtrain
