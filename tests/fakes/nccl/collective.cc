#include "nccl/collective.h"

#include <algorithm>
#include <memory>

#include "nccl/elements.h"

namespace fakes {
namespace {

// Memory of an operation, for as long as it runs.
class Used {
 public:
  Used(uint64_t address, size_t bytes, const char* user) : address_(bytes > 0 ? address : 0) {
    if (address_ != 0) bytes_ = static_cast<char*>(Cuda().use(address, bytes, user));
  }
  ~Used() {
    if (address_ != 0) Cuda().release(address_);
  }
  Used(const Used&) = delete;
  Used& operator=(const Used&) = delete;
  char* operator+(size_t offset) const { return bytes_ + offset; }

 private:
  uint64_t address_;
  char* bytes_ = nullptr;
};

bool GivenUp(const Communicator& comm) { return comm.aborted || comm.segment->failure != 0; }

// As a kernel whose peer died: it spins, and the error is seen elsewhere.
void NoteWhoIsGone(Communicator* comm, int rank) {
  int none = kNcclSuccess;
  if (comm->segment->members[rank].gone != 0) comm->failure.compare_exchange_strong(none, kNcclRemoteError);
}

void Hang(Communicator* comm) {
  comm->segment.Await([] { return false; }, [comm] { return GivenUp(*comm); });
}

bool Scales(const Operation& operation) {
  return operation.op >= kFirstUserOp || (operation.op == kAvg && IsFloat(operation.dtype));
}

class Collective {
 public:
  Collective(Communicator* comm, const Operation& operation, const Announcement& order)
      : comm_(comm),
        shared_(*comm->segment),
        operation_(operation),
        order_(order),
        size_(SizeOf(operation.dtype)),
        send_(operation.send, size_ * operation.count * SentPieces(), NameOf(operation.kind)),
        recv_(operation.recv, size_ * operation.count * ReceivedPieces(), NameOf(operation.kind)) {}

  void Run() {
    Announce();
    if (!Meet()) return;
    Compare();
    if (Meet()) Exchange();
  }

 private:
  size_t SentPieces() const {
    const bool scatters = operation_.kind == Kind::kReduceScatter || operation_.kind == Kind::kAlltoAll;
    return scatters                                                      ? static_cast<size_t>(comm_->ranks)
           : operation_.kind == Kind::kBroadcast && operation_.send == 0 ? 0
                                                                         : 1;
  }
  size_t ReceivedPieces() const {
    const bool gathers = operation_.kind == Kind::kAllGather || operation_.kind == Kind::kAlltoAll;
    return gathers ? static_cast<size_t>(comm_->ranks) : 1;
  }

  void Announce() {
    Announcement& own = shared_.members[comm_->rank].announcement;
    own = order_;
    own.kind = static_cast<int32_t>(operation_.kind);
    own.dtype = operation_.dtype;
    own.op = std::min<int>(operation_.op, kFirstUserOp);
    own.root = operation_.root;
    own.count = operation_.count;
    own.registered = operation_.registered ? 1 : 0;
  }

  // All ranks of the communicator come this far; false if the operation ends instead.
  bool Meet() {
    const uint64_t phase = ++comm_->phase;
    shared_.members[comm_->rank].phase = phase;
    comm_->segment.Ring();
    auto all_here = [&] {
      for (int rank = 0; rank < comm_->ranks; ++rank)
        if (shared_.members[rank].phase < phase) return NoteWhoIsGone(comm_, rank), false;
      return true;
    };
    return comm_->segment.Await(all_here, [this] { return GivenUp(*comm_); }) && !GivenUp(*comm_);
  }

  void Compare() const {
    const Announcement& own = shared_.members[comm_->rank].announcement;
    for (int rank = 0; rank < comm_->ranks; ++rank) {
      const Announcement& other = shared_.members[rank].announcement;
      if (std::memcmp(&own, &other, offsetof(Announcement, others)) != 0) FailFor(own, other, rank);
      for (int i = 0; i < kMaxComms; ++i)
        for (int j = 0; j < kMaxComms; ++j)
          if (own.others[i] != 0 && own.others[i] == other.others[j] && own.launched[i] != other.launched[j])
            comm_->segment.Fail(kNcclInvalidUsage, "ranks launched on several communicators in different orders");
    }
  }

  void FailFor(const Announcement& own, const Announcement& other, int rank) const {
    char text[400];
    std::snprintf(
        text, sizeof text,
        "rank %d called %s (count %lu, type %d, op %d, root %d, registered %lu), but rank %d %s (count %lu, type %d, "
        "op %d, root %d, registered %lu)",
        comm_->rank, NameOf(static_cast<Kind>(own.kind)), own.count, own.dtype, own.op, own.root, own.registered, rank,
        NameOf(static_cast<Kind>(other.kind)), other.count, other.dtype, other.op, other.root, other.registered);
    comm_->segment.Fail(kNcclInvalidUsage, text);
  }

  // Every rank publishes `count` elements of its own from `begin`, and take(begin, count) reads those of all.
  template <typename Take>
  bool Publish(size_t send_offset, size_t begin, size_t count, const Take& take) {
    char* slot = shared_.slots[comm_->rank];
    if (send_ + 0 != nullptr) std::memcpy(slot, send_ + (send_offset + begin) * size_, count * size_);
    if (Scales(operation_))
      Scale(operation_.dtype, operation_.op == kAvg ? 1.0 / comm_->ranks : operation_.factor, slot, count);
    if (!Meet()) return false;
    take(begin, count);
    return Meet();
  }

  // The same for all of `length` elements, of which a slot holds some.
  template <typename Take>
  bool PublishAll(size_t send_offset, size_t first, size_t length, const Take& take) {
    const size_t most = kSlotBytes / size_;
    for (size_t begin = first; begin < first + length; begin += most)
      if (!Publish(send_offset, begin, std::min(most, first + length - begin), take)) return false;
    return true;
  }

  // As a ring does, the sum of a piece begins at the rank behind its owner: so its rounding depends on the place.
  void ReduceInto(char* into, int owner, size_t count) const {
    const int first = (owner + 1) % comm_->ranks;
    std::memcpy(into, shared_.slots[first], count * size_);
    const int op = operation_.op >= kFirstUserOp ? kSum : operation_.op;
    for (int step = 1; step < comm_->ranks; ++step)
      Accumulate(operation_.dtype, op, shared_.slots[(first + step) % comm_->ranks], into, count);
    if (op == kAvg && !IsFloat(operation_.dtype)) Divide(operation_.dtype, comm_->ranks, into, count);
  }

  void Exchange() {
    switch (operation_.kind) {
      case Kind::kAllReduce:
        return AllReduce();
      case Kind::kReduceScatter:
        return ReduceScatter();
      case Kind::kAlltoAll:
        return AlltoAll();
      default:
        return Gather();
    }
  }

  void AllReduce() {
    const size_t piece = (operation_.count + comm_->ranks - 1) / comm_->ranks;
    for (int owner = 0; owner < comm_->ranks; ++owner) {
      const size_t first = std::min(operation_.count, owner * piece);
      auto reduce = [&](size_t begin, size_t count) { ReduceInto(recv_ + begin * size_, owner, count); };
      if (!PublishAll(0, first, std::min(piece, operation_.count - first), reduce)) return;
    }
  }

  void ReduceScatter() {
    for (int owner = 0; owner < comm_->ranks; ++owner) {
      auto reduce = [&](size_t begin, size_t count) {
        if (owner == comm_->rank) ReduceInto(recv_ + begin * size_, owner, count);
      };
      if (!PublishAll(owner * operation_.count, 0, operation_.count, reduce)) return;
    }
  }

  void AlltoAll() {
    for (int receiver = 0; receiver < comm_->ranks; ++receiver) {
      auto take = [&](size_t begin, size_t count) {
        if (receiver != comm_->rank) return;
        for (int rank = 0; rank < comm_->ranks; ++rank)
          std::memcpy(recv_ + (rank * operation_.count + begin) * size_, shared_.slots[rank], count * size_);
      };
      if (!PublishAll(receiver * operation_.count, 0, operation_.count, take)) return;
    }
  }

  // AllGather, and Broadcast, which takes only the root's.
  void Gather() {
    const bool all = operation_.kind == Kind::kAllGather;
    PublishAll(0, 0, operation_.count, [&](size_t begin, size_t count) {
      for (int rank = all ? 0 : operation_.root; rank < (all ? comm_->ranks : operation_.root + 1); ++rank)
        std::memcpy(recv_ + ((all ? rank * operation_.count : 0) + begin) * size_, shared_.slots[rank], count * size_);
    });
  }

  Communicator* const comm_;
  Shared& shared_;
  const Operation& operation_;
  const Announcement& order_;
  const size_t size_;
  const Used send_, recv_;
};

// One Send or Recv, piece by piece through the memory of its pair of ranks.
class Transfer {
 public:
  Transfer(Communicator* comm, const Operation& operation)
      : comm_(comm),
        operation_(operation),
        sends_(operation.kind == Kind::kSend),
        pair_(sends_ ? comm->segment->pairs[comm->rank][operation.root]
                     : comm->segment->pairs[operation.root][comm->rank]),
        bytes_(operation.count * SizeOf(operation.dtype)),
        memory_(sends_ ? operation.send : operation.recv, bytes_, NameOf(operation.kind)) {}

  bool done() const { return done_; }
  int lane() const { return 2 * operation_.root + (sends_ ? 1 : 0); }  // its transfers keep their order

  // Moves what can be moved; whether that was something.
  bool Advance() {
    NoteWhoIsGone(comm_, operation_.root);
    const bool full = pair_.sent > pair_.received;
    if (full == sends_) return false;
    const size_t count = std::min(kPairBytes, bytes_ - moved_);
    if (sends_)
      Put(count);
    else if (!Take(count))
      return false;
    moved_ += count;
    done_ = moved_ == bytes_;
    comm_->segment.Ring();
    return true;
  }

 private:
  void Put(size_t count) {
    pair_.count = operation_.count;
    pair_.dtype = operation_.dtype;
    pair_.registered = operation_.registered;
    if (count > 0) std::memcpy(pair_.data, memory_ + moved_, count);
    ++pair_.sent;
  }

  bool Take(size_t count) {
    if (pair_.count != operation_.count || pair_.dtype != operation_.dtype) {
      comm_->segment.Fail(kNcclInvalidUsage, "ncclRecv expects another count or type than ncclSend sends");
      return false;
    }
    // NCCL promises nothing then; 2.30 waited for ever in a message of 18 KB.
    if (pair_.registered != operation_.registered) {
      comm_->segment.Fail(kNcclInvalidUsage, "of ncclSend's and ncclRecv's memory one is registered and one is not");
      return false;
    }
    if (count > 0) std::memcpy(memory_ + moved_, pair_.data, count);
    ++pair_.received;
    return true;
  }

  Communicator* const comm_;
  const Operation& operation_;
  const bool sends_;
  Pair& pair_;
  const size_t bytes_;
  const Used memory_;
  size_t moved_ = 0;
  bool done_ = false;
};

void RunTransfers(Communicator* comm, std::vector<std::unique_ptr<Transfer>> transfers) {
  auto left = [&] {
    return std::any_of(transfers.begin(), transfers.end(), [](const auto& one) { return !one->done(); });
  };
  auto advance = [&] {
    bool moved = false;
    std::vector<bool> taken(2 * kMaxRanks, false);
    for (auto& transfer : transfers) {
      if (transfer->done() || taken[transfer->lane()]) continue;
      taken[transfer->lane()] = true;
      moved |= transfer->Advance();
    }
    return moved;
  };
  while (left() && comm->segment.Await(advance, [comm] { return GivenUp(*comm); })) {
  }
}

void RunOperations(const Batch& batch) {
  Communicator* comm = batch.comm;
  std::vector<std::unique_ptr<Transfer>> transfers;
  for (const Operation& operation : batch.operations) {
    int none = kNcclSuccess;
    if (operation.breaks != 0) comm->failure.compare_exchange_strong(none, operation.breaks);
    if (operation.breaks != 0 || operation.hangs) return Hang(comm);
    if (operation.kind == Kind::kSend || operation.kind == Kind::kRecv)
      transfers.push_back(std::make_unique<Transfer>(comm, operation));
  }
  RunTransfers(comm, std::move(transfers));
  for (const Operation& operation : batch.operations) {
    if (GivenUp(*comm)) return;
    if (operation.kind != Kind::kSend && operation.kind != Kind::kRecv) Collective(comm, operation, batch.order).Run();
  }
}

}  // namespace

void RunBatch(void* argument) {
  const std::unique_ptr<Batch> batch(static_cast<Batch*>(argument));
  if (batch->before != nullptr) batch->before->Wait();
  if (!GivenUp(*batch->comm)) RunOperations(*batch);
  int none = kNcclSuccess;
  const int failure = batch->comm->segment->failure;
  if (failure != 0) batch->comm->failure.compare_exchange_strong(none, failure);
  batch->after->Pass();
}

}  // namespace fakes
