// Transport over MPI, one template for all ABIs (transport/mpi_abi.h). MPI is mpi4py's: found, used, never finalised.
//
// All calls are non-blocking and made by the context's driver; MPI moves data only inside its calls, so every Test and
// ReceiveFrame is progress. Messages are an Isend or Irecv each. Frames are cut into pieces of at most 64 KiB, sent
// with one control tag and taken by receives from any source that are posted ahead. MPI matches in the order of
// posting, so the oldest posted receive is the next piece of its sender; testing it alone keeps the order, and one MPI
// call per look.
#include "transport/mpi.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/decimal.h"
#include "base/log.h"
#include "base/threads.h"
#include "transport/lost_peers.h"
#include "transport/mpi_abi.h"
#include "transport/mpi_library.h"

namespace ringtrain {
namespace {

constexpr int kControlTag = Wire::kMaxTag;
constexpr size_t kPieceBytes = 64 << 10;
constexpr size_t kPostedPieces = 8;
constexpr size_t kMaxMessageBytes = size_t{1} << 30;

// Before the bytes of each piece: what of its frame is still to come, this piece included.
struct PieceHeader {
  uint64_t remaining;
};
constexpr size_t kPiecePayload = kPieceBytes - sizeof(PieceHeader);

std::string SecondsText(double seconds) { return Decimal("%g", seconds); }

// An MPI library with one ABI: its functions, and its errors as Status.
template <typename Abi>
class Mpi : public Abi, public MpiFunctions<Abi> {
 public:
  using Comm = typename Abi::Comm;
  using Request = typename Abi::Request;
  using MessageStatus = typename Abi::MessageStatus;

  explicit Mpi(std::unique_ptr<MpiLibrary> library) : Abi(*library), library_(std::move(library)) {}

  Status Load() {
    const char* missing = MpiFunctions<Abi>::Load(*library_);
    if (missing == nullptr && Abi::complete()) return {};
    return Status::Unsupported("init of MPI from '" + library_->path() + "': expected MPI 3.1 with " + Abi::kName +
                               " but it has no " + (missing != nullptr ? missing : "predefined handles") +
                               ". Use a newer MPI library.");
  }

  // Ok, or MPI's own words after what was attempted.
  Status Check(int code, const std::string& attempt) const {
    if (code == kMpiSuccess) return {};
    char text[Abi::kMaxErrorText + 1] = "";
    int length = 0;
    if (this->Error_string(code, text, &length) != kMpiSuccess) length = 0;
    return Status::Internal(
        "MPI failed to " + attempt + ": " +
        (length > 0 ? std::string(text, static_cast<size_t>(length)) : "error " + std::to_string(code)) +
        ". Library: " + library_->version() + ".");
  }

  // Whether it may be due to the peer: classes up to MPI_ERR_TRUNCATE are mistakes in arguments and sizes.
  bool MayBeThePeers(int code) const {
    int error_class = 0;
    if (this->Error_class(code, &error_class) != kMpiSuccess) return false;
    return error_class > Abi::kTruncated || error_class == Abi::kUnknownError;
  }

  const MpiLibrary& library() const { return *library_; }

 private:
  const std::unique_ptr<MpiLibrary> library_;
};

template <typename Abi>
class MpiTransport : public Transport {
 public:
  using Comm = typename Abi::Comm;
  using Request = typename Abi::Request;
  using MessageStatus = typename Abi::MessageStatus;

  explicit MpiTransport(std::unique_ptr<MpiLibrary> library) : mpi_(std::move(library)), comm_() {}
  ~MpiTransport() override { Close(false, 0); }

  Status Open(Comm communicator, double timeout_seconds) {
    RT_TRY(mpi_.Load());
    RT_TRY(RefuseUnsuitable());
    RT_TRY(mpi_.Check(mpi_.Comm_rank(communicator, &rank_), "ask for this rank"));
    RT_TRY(mpi_.Check(mpi_.Comm_size(communicator, &size_), "ask for the number of ranks"));
    RT_TRY(Duplicate(communicator, timeout_seconds));
    open_ = true;
    pieces_sent_.assign(static_cast<size_t>(size_), 0);
    RT_TRY(mpi_.Check(mpi_.Comm_set_errhandler(comm_, mpi_.errors_return), "make errors return"));
    for (size_t i = 0; i < kPostedPieces; ++i) RT_TRY(PostPiece(std::vector<char>(kPieceBytes)));
    return {};
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  Status SendFrame(int to, const std::string& frame) override {
    size_t begin = 0;
    do {
      if (lost_.Has(to)) return {};
      const size_t payload = std::min(frame.size() - begin, kPiecePayload);
      const PieceHeader header = {frame.size() - begin};
      std::vector<char> piece(sizeof header + payload);
      std::memcpy(piece.data(), &header, sizeof header);
      std::memcpy(piece.data() + sizeof header, frame.data() + begin, payload);
      RT_TRY(SendPiece(to, std::move(piece)));
      begin += payload;
    } while (begin < frame.size());
    return {};
  }

  Status ReceiveFrame(int* from, std::string* frame, bool* arrived) override {
    *arrived = false;
    RT_TRY(Drive());
    while (!*arrived && !posted_.empty()) {
      int complete = 0;
      MessageStatus status;
      const int code = mpi_.Test(&posted_.front().request, &complete, &status);
      if (code != kMpiSuccess) return HearNobody(code);
      if (complete == 0) {
        lost_.FramesAreTaken();
        return {};
      }
      Piece piece = std::move(posted_.front());
      posted_.pop_front();
      int bytes = 0;
      RT_TRY(mpi_.Check(mpi_.Get_count(&status, mpi_.byte, &bytes), "ask for the size of a frame"));
      *from = status.source;
      ++pieces_taken_;
      CountArrival(*from);
      RT_TRY(TakePiece(*from, piece.bytes.data(), static_cast<size_t>(bytes), frame, arrived));
      RT_TRY(PostPiece(std::move(piece.bytes)));
    }
    return {};
  }

  Status StartSend(int to, int tag, const void* data, size_t bytes, Ticket* ticket) override {
    RT_TRY(RefuseTooLong("send", to, tag, bytes));
    Message message = {mpi_.no_request, bytes, to, tag, false};
    if (!lost_.Has(to)) {
      const int code = mpi_.Isend(data, static_cast<int>(bytes), mpi_.byte, to, tag, comm_, &message.request);
      RT_TRY(CheckWith(to, code, [&] { return Describe("send", to, tag, bytes); }));
    }
    *ticket = Keep(message);
    return {};
  }

  Status StartReceive(int from, int tag, void* data, size_t bytes, Ticket* ticket) override {
    RT_TRY(RefuseTooLong("receive", from, tag, bytes));
    Message message = {mpi_.no_request, bytes, from, tag, true};
    if (!lost_.Has(from)) {
      const int code = mpi_.Irecv(data, static_cast<int>(bytes), mpi_.byte, from, tag, comm_, &message.request);
      RT_TRY(CheckWith(from, code, [&] { return Describe("receive", from, tag, bytes); }));
    }
    *ticket = Keep(message);
    return {};
  }

  Status Test(Ticket ticket, bool* complete) override {
    Message& message = messages_[static_cast<size_t>(ticket)];
    MessageStatus status;
    int flag = 0;
    const int code = mpi_.Test(&message.request, &flag, &status);
    *complete = flag != 0;
    if (code == kMpiSuccess && !*complete) return {};
    const Status failure = CheckWith(message.peer, code, [&] {
      return Describe(message.receives ? "receive" : "send", message.peer, message.tag, message.bytes);
    });
    if (failure.ok() && lost_.Has(message.peer)) {
      *complete = false;
      return {};
    }
    free_tickets_.push_back(ticket);
    RT_TRY(failure);
    if (!message.receives) return {};
    CountArrival(message.peer);
    return CheckSize(message, status);
  }

  // A send cannot be withdrawn: it gets a moment to leave. Nor can a receive that has found its message: a peer that
  // was stopped and goes on may write it.
  void Abandon() override {
    const Nanoseconds deadline = DeadlineAfter(kCancelSeconds);
    std::vector<Request*> receives;
    for (Message& message : messages_)
      if (message.receives && message.request != mpi_.no_request) receives.push_back(&message.request);
    const size_t held = Withdraw(receives, deadline);
    while (!MessagesLeft() && Now() < deadline) SleepBriefly();
    if (held > 0 && log_ != nullptr)
      log_->Warning("rank " + std::to_string(rank_) +
                    ": MPI must give back the memory of a world that has ended, but holds it for " +
                    std::to_string(held) +
                    " messages that others had begun to send. If one of these goes on, it may still write there. Use "
                    "none of the tensors that were under way, or end this process.");
  }

  bool TakeLostPeer(LostPeer* lost) override { return lost_.Take(lost); }

  // Forgets frames that have left. Oldest first and no further: MPI drives them all at each call.
  Status Drive() override {
    while (!leaving_.empty()) {
      Piece& oldest = leaving_.front();
      MessageStatus status;
      int complete = 0;
      const int code = mpi_.Test(&oldest.request, &complete, &status);
      if (code == kMpiSuccess && complete == 0) return {};
      RT_TRY(CheckWith(oldest.to, code, [&] { return "send a frame to rank " + std::to_string(oldest.to); }));
      leaving_.pop_front();
    }
    return {};
  }

  bool Busy() const override { return !leaving_.empty() || messages_.size() != free_tickets_.size(); }
  bool RingsDoorbell() const override { return false; }
  void SetDoorbell(Doorbell*) override {}  // MPI has nothing to ring it with
  void SetLog(Log* log) override { log_ = log; }

  void Close(bool clean, double timeout_seconds) override {
    if (!std::exchange(open_, false) || mpi_.library().finalized()) return;
    const Nanoseconds deadline = DeadlineAfter(timeout_seconds);
    const bool emptied = clean && TakeLastPieces(deadline);
    while (!SendsFinished() && Now() < deadline) SleepBriefly();
    const bool silent = WithdrawReceives(DeadlineAfter(kCancelSeconds)) == 0;
    if (!silent || !leaving_.empty()) LeaveBuffersToMpi();
    if (emptied && silent) mpi_.Comm_free(&comm_);
  }

  std::string Describe() const override { return mpi_.library().version() + " (" + Abi::kName + ")"; }

 private:
  struct Piece {  // one frame, or part of one, on its way out or expected
    Request request;
    std::vector<char> bytes;
    int to = -1;  // of one on its way out
  };
  struct Message {
    Request request;
    size_t bytes;
    int peer, tag;
    bool receives;
  };
  static constexpr double kCancelSeconds = 1.0;  // withdrawing a receive is local and quick, unless MPI is broken

  static std::string Describe(const char* verb, int peer, int tag, size_t bytes) {
    return std::string(verb) + " a message of " + std::to_string(bytes) + " bytes, tag " + std::to_string(tag) + ", " +
           (*verb == 's' ? "to" : "from") + " rank " + std::to_string(peer);
  }

  Status RefuseTooLong(const char* verb, int peer, int tag, size_t bytes) const {
    if (bytes <= kMaxMessageBytes) return {};
    return Status::InvalidArgument(Describe(verb, peer, tag, bytes) + ": expected at most 1 GiB. Split it.");
  }

  Status RefuseUnsuitable() {
    int level = -1;
    RT_TRY(mpi_.Check(mpi_.Query_thread(&level), "ask for the thread level"));
    if (level < Abi::kThreadMultiple)
      return Status::InvalidArgument(
          "init of MPI: expected thread level MPI_THREAD_MULTIPLE but MPI was initialised with level " +
          std::to_string(level) +
          ". Call ringtrain's init() before importing mpi4py.MPI, or set mpi4py.rc.thread_level = \"multiple\" before "
          "it.");
    int* bound = nullptr;
    int found = 0;
    RT_TRY(mpi_.Check(mpi_.Comm_get_attr(mpi_.world, Abi::kTagUpperBound, &bound, &found), "ask for the highest tag"));
    if (found != 0 && *bound >= kControlTag) return {};
    return Status::Unsupported("init of MPI: expected message tags up to " + std::to_string(kControlTag) + " but " +
                               mpi_.library().version() + " has " + (found != 0 ? std::to_string(*bound) : "none") +
                               ". Choose another MPI transport (UCX or libfabric provider) or another MPI.");
  }

  // The duplicate is made without blocking, so that a rank which never comes is an error and not a hang.
  Status Duplicate(Comm communicator, double timeout_seconds) {
    auto duplicate = std::make_unique<Comm>();  // MPI may write to it until the request is complete
    Request request = mpi_.no_request;
    RT_TRY(mpi_.Check(mpi_.Comm_idup(communicator, duplicate.get(), &request), "duplicate the communicator"));
    const Nanoseconds deadline = DeadlineAfter(timeout_seconds);
    for (bool complete = false; !complete;) {
      MessageStatus status;
      RT_TRY(TestRequest(&request, &complete, &status, "duplicate the communicator"));
      if (complete) break;
      if (Now() >= deadline) {
        LeaveToMpi(std::move(duplicate));
        return Status::Timeout("init of MPI: expected all " + std::to_string(size_) + " ranks to call init() within " +
                               SecondsText(timeout_seconds) + " s but not all did, seen on rank " +
                               std::to_string(rank_) +
                               ". Call init() on every rank of the communicator, or raise start_timeout_seconds.");
      }
      SleepBriefly();
    }
    comm_ = *duplicate;
    return {};
  }

  Status TestRequest(Request* request, bool* complete, MessageStatus* status, const char* attempt) {
    int flag = 0;
    const int code = mpi_.Test(request, &flag, status);
    *complete = flag != 0;
    return mpi_.Check(code, attempt);
  }

  // Ok if nothing is wrong, or if it is the peer that is: then it is lost, and that is told apart.
  template <typename Attempt>
  Status CheckWith(int peer, int code, Attempt attempt) {
    if (code == kMpiSuccess) return {};
    const Status failure = mpi_.Check(code, attempt());
    if (!mpi_.MayBeThePeers(code)) return failure;
    lost_.Add(peer, failure.message().substr(0, failure.message().size() - 1));  // a cause has no full stop
    return {};
  }

  Status SendPiece(int to, std::vector<char> bytes) {
    leaving_.push_back({mpi_.no_request, std::move(bytes), to});
    Piece& piece = leaving_.back();
    const int code = mpi_.Isend(piece.bytes.data(), static_cast<int>(piece.bytes.size()), mpi_.byte, to, kControlTag,
                                comm_, &piece.request);
    if (code != kMpiSuccess) leaving_.pop_back();
    RT_TRY(CheckWith(to, code, [&] { return "send a frame to rank " + std::to_string(to); }));
    if (code != kMpiSuccess) return {};
    ++pieces_sent_[static_cast<size_t>(to)];
    return Drive();
  }

  // A receive from anybody has failed. Where a peer is lost that is the reason; else it cannot be traced to one.
  Status HearNobody(int code) {
    if (!lost_.any() || !mpi_.MayBeThePeers(code)) return mpi_.Check(code, "receive a frame");
    if (posted_.front().request == mpi_.no_request) posted_.pop_front();
    lost_.FramesAreTaken();
    return {};
  }

  Status PostPiece(std::vector<char> bytes) {
    posted_.push_back({mpi_.no_request, std::move(bytes), -1});
    Piece& piece = posted_.back();
    const int code = mpi_.Irecv(piece.bytes.data(), static_cast<int>(kPieceBytes), mpi_.byte, Abi::kAnySource,
                                kControlTag, comm_, &piece.request);
    if (code != kMpiSuccess) posted_.pop_back();
    return mpi_.Check(code, "post a receive for frames");
  }

  // Adds a piece to its sender's frame; *whole if that was the last.
  Status TakePiece(int from, const char* piece, size_t bytes, std::string* frame, bool* whole) {
    if (partial_.empty()) partial_.resize(static_cast<size_t>(size_));
    PartialFrame& partial = partial_[static_cast<size_t>(from)];
    PieceHeader header = {0};
    if (bytes >= sizeof header) std::memcpy(&header, piece, sizeof header);
    const size_t payload = bytes - sizeof header;
    const bool follows = partial.missing == 0 || partial.missing == header.remaining;
    if (bytes < sizeof header || payload > header.remaining || !follows)
      return Status::Internal("frame from rank " + std::to_string(from) + ": expected the next piece but found " +
                              std::to_string(bytes) + " bytes that are none. Run the same ringtrain on all ranks.");
    partial.bytes.append(piece + sizeof header, payload);
    partial.missing = header.remaining - payload;
    *whole = partial.missing == 0;
    if (*whole) *frame = std::exchange(partial.bytes, std::string());
    return {};
  }

  Status CheckSize(const Message& message, const MessageStatus& status) {
    int bytes = 0;
    RT_TRY(mpi_.Check(mpi_.Get_count(&status, mpi_.byte, &bytes), "ask for the size of a message"));
    if (static_cast<size_t>(bytes) == message.bytes) return {};
    return Status::Internal(Describe("receive", message.peer, message.tag, message.bytes) + ": found " +
                            std::to_string(bytes) + " bytes. Run the same ringtrain on all ranks.");
  }

  Ticket Keep(const Message& message) {
    if (free_tickets_.empty()) {
      messages_.push_back(message);
      return static_cast<Ticket>(messages_.size() - 1);
    }
    const Ticket ticket = free_tickets_.back();
    free_tickets_.pop_back();
    messages_[static_cast<size_t>(ticket)] = message;
    return ticket;
  }

  // Whether all frames and messages have left, or cannot leave any more. A message's memory is its owner's again after
  // Close.
  bool SendsFinished() {
    const bool frames_left = !Drive().ok() || leaving_.empty();
    return MessagesLeft() && frames_left;
  }

  bool MessagesLeft() {
    bool messages_left = true;
    for (Message& message : messages_) {
      bool complete = message.receives;
      MessageStatus status;
      if (!complete && TestRequest(&message.request, &complete, &status, "send a message").ok())
        messages_left &= complete;
    }
    return messages_left;
  }

  // MPI may give a freed communicator's number to the next one, where a frame that is still on its way would be read as
  // one of the next world. So every rank learns how many pieces were sent to it, and takes them all.
  bool TakeLastPieces(Nanoseconds deadline) {
    auto sent = std::make_unique<std::vector<unsigned>>(std::move(pieces_sent_));
    auto expected = std::make_unique<unsigned>(0);
    Request request = mpi_.no_request;
    const int code =
        mpi_.Ireduce_scatter_block(sent->data(), expected.get(), 1, mpi_.unsigned_number, mpi_.sum, comm_, &request);
    if (code != kMpiSuccess) return false;
    bool counted = false;
    MessageStatus status;
    while ((counted || TestRequest(&request, &counted, &status, "count frames").ok()) && TakeFrames().ok()) {
      if (counted && pieces_taken_ == *expected) return true;
      if (Now() >= deadline) break;
      SleepBriefly();
    }
    if (!counted) {
      LeaveToMpi(std::move(sent));
      LeaveToMpi(std::move(expected));
    }
    return false;
  }

  // Takes what has arrived; it is no longer of interest.
  Status TakeFrames() {
    for (bool arrived = true; arrived;) {
      int from;
      std::string frame;
      RT_TRY(ReceiveFrame(&from, &frame, &arrived));
    }
    return {};
  }

  // Cancels the receives that are still posted; of how many MPI has not let go.
  size_t WithdrawReceives(Nanoseconds deadline) {
    std::vector<Request*> requests;
    for (Piece& piece : posted_) requests.push_back(&piece.request);
    for (Message& message : messages_)
      if (message.receives && message.request != mpi_.no_request) requests.push_back(&message.request);
    return Withdraw(requests, deadline);
  }

  size_t Withdraw(const std::vector<Request*>& requests, Nanoseconds deadline) {
    for (Request* request : requests) mpi_.Cancel(request);
    size_t held = 0;
    for (Request* request : requests) {
      bool complete = false;
      MessageStatus status;
      while (TestRequest(request, &complete, &status, "withdraw a receive").ok() && !complete && Now() < deadline)
        SleepBriefly();
      held += complete ? 0 : 1;
    }
    return held;
  }

  void LeaveBuffersToMpi() {
    LeaveToMpi(std::make_unique<std::deque<Piece>>(std::move(leaving_)));
    LeaveToMpi(std::make_unique<std::deque<Piece>>(std::move(posted_)));
    leaving_.clear();
    posted_.clear();
  }

  // MPI may still read or write it, so it outlives us, and main. It stays reachable: who looks for leaks finds none.
  template <typename Memory>
  static void LeaveToMpi(std::unique_ptr<Memory> memory) {
    static auto* const mutex = new std::mutex();
    static auto* const left = new std::vector<std::unique_ptr<Memory>>();
    const std::lock_guard<std::mutex> lock(*mutex);
    left->push_back(std::move(memory));
  }

  struct PartialFrame {
    std::string bytes;
    uint64_t missing = 0;
  };

  Mpi<Abi> mpi_;
  Comm comm_;  // ours alone
  bool open_ = false;
  int rank_ = 0, size_ = 1;
  std::deque<Piece> leaving_;          // frames being sent, oldest first
  std::deque<Piece> posted_;           // receives for frames, oldest first
  std::vector<PartialFrame> partial_;  // by sender
  std::vector<unsigned> pieces_sent_;  // by receiver
  unsigned pieces_taken_ = 0;          // of all senders
  std::vector<Message> messages_;      // by ticket
  std::vector<Ticket> free_tickets_;
  LostPeers lost_;
  Log* log_ = nullptr;
};

template <typename Abi>
Status OpenWithAbi(std::unique_ptr<MpiLibrary> library, typename Abi::Comm communicator, double timeout_seconds,
                   std::unique_ptr<Transport>* transport) {
  auto opened = std::make_unique<MpiTransport<Abi>>(std::move(library));
  RT_TRY(opened->Open(communicator, timeout_seconds));
  *transport = std::move(opened);
  return {};
}

}  // namespace

Status OpenMpiTransport(const std::string& library, uintptr_t communicator, double timeout_seconds,
                        std::unique_ptr<Transport>* transport) {
  std::unique_ptr<MpiLibrary> loaded;
  RT_TRY(MpiLibrary::Open(library, &loaded));
  if (loaded->family() == MpiLibrary::Family::kOpenMpi)
    return OpenWithAbi<OpenMpiAbi>(std::move(loaded), reinterpret_cast<OpenMpiAbi::Comm>(communicator), timeout_seconds,
                                   transport);
  if (loaded->family() == MpiLibrary::Family::kStandard)
    return OpenWithAbi<StandardAbi>(std::move(loaded), reinterpret_cast<StandardAbi::Comm>(communicator),
                                    timeout_seconds, transport);
  return OpenWithAbi<MpichAbi>(std::move(loaded), static_cast<MpichAbi::Comm>(communicator), timeout_seconds,
                               transport);
}

Status OpenMpiRendezvous(const std::string& library, uintptr_t communicator, double timeout_seconds,
                         const std::string& layout, std::unique_ptr<Rendezvous>* rendezvous) {
  std::unique_ptr<Transport> transport;
  RT_TRY(OpenMpiTransport(library, communicator, timeout_seconds, &transport));
  std::vector<int> simulated;
  if (!layout.empty()) RT_TRY(ParseLayout(layout, transport->size(), &simulated));
  *rendezvous = MeetByFrames(std::move(transport), std::move(simulated));
  return {};
}

}  // namespace ringtrain
