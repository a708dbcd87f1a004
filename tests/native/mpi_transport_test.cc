// The MPI transport, with a real MPI library.
//
// RT_TEST_MPI_LIBRARY names the library (libmpi.so.40, libmpi.so.12, libmpi_abi.so.1); run it under that library's
// mpirun with any number of ranks. Without the variable only what needs no MPI is tested.
#define RT_CHECK_OWN_MAIN
#include "transport/mpi.h"

#include <dlfcn.h>
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>

#include "check.h"
#include "transport_conformance.h"

using namespace ringtrain;

namespace {

std::string mpi_path;          // empty: run without MPI
uintptr_t world_communicator;  // MPI_COMM_WORLD

template <typename Function>
Function MpiFunction(const char* name) {
  static void* library = dlopen(mpi_path.c_str(), RTLD_NOW | RTLD_LOCAL);
  void* symbol = library != nullptr ? dlsym(library, name) : nullptr;
  if (symbol == nullptr) std::fprintf(stderr, "no %s in '%s': %s\n", name, mpi_path.c_str(), dlerror());
  RT_REQUIRE(symbol != nullptr);
  return reinterpret_cast<Function>(symbol);
}

bool Contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

std::unique_ptr<Transport> OpenWorld() {
  std::unique_ptr<Transport> transport;
  RT_REQUIRE_OK(OpenMpiTransport(mpi_path, world_communicator, Conformance::kPatienceSeconds, &transport));
  return transport;
}

void CheckRefusal(StatusCode code, const std::string& part) {
  std::unique_ptr<Transport> transport;
  const Status status = OpenMpiTransport(mpi_path, world_communicator, 1.0, &transport);
  RT_CHECK_EQ(status.code(), code);
  if (!Contains(status.message(), part)) RT_CHECK_EQ(status.message(), part);
  RT_CHECK(transport == nullptr);
}

bool HasStandardAbi() { return Contains(mpi_path, "libmpi_abi"); }

void StartMpi() {
  MpiFunction<int (*)(int*, char***, int, int*)>("MPI_Init_thread");  // loads the library
  void* object = dlsym(dlopen(mpi_path.c_str(), RTLD_NOW | RTLD_NOLOAD), "ompi_mpi_comm_world");
  if (HasStandardAbi())
    world_communicator = 0x101;
  else
    world_communicator = object != nullptr ? reinterpret_cast<uintptr_t>(object) : 0x44000000;
}

}  // namespace

RT_TEST(a_process_without_mpi_is_refused) {
  if (!mpi_path.empty()) return;
  CheckRefusal(StatusCode::kInvalidArgument, "Import mpi4py.MPI first.");
}

// The order of the tests is that of this file: MPI can be initialised and finalised once.
RT_TEST(an_mpi_that_is_not_initialised_is_refused) {
  if (mpi_path.empty()) return;
  StartMpi();
  CheckRefusal(StatusCode::kInvalidArgument, "MPI_Init has not been called");
  const int multiple = HasStandardAbi() ? 4096 : 3;
  int level = -1;
  RT_REQUIRE_EQ(MpiFunction<int (*)(int*, char***, int, int*)>("MPI_Init_thread")(nullptr, nullptr, multiple, &level),
                0);
  RT_REQUIRE_EQ(level, multiple);
}

RT_TEST(conforms) {
  if (mpi_path.empty()) return;
  std::unique_ptr<Transport> transport = OpenWorld();
  RT_CHECK(!transport->RingsDoorbell());
  RT_CHECK_EQ(Contains(transport->Describe(), "(the standard ABI of MPI 5)"), HasStandardAbi());
  Conformance(*transport).All();
  transport->Close(true, 5.0);
}

RT_TEST(library_is_found_without_its_path) {
  if (mpi_path.empty()) return;
  std::unique_ptr<Transport> transport;
  RT_REQUIRE_OK(OpenMpiTransport("/no/such/object.so", world_communicator, Conformance::kPatienceSeconds, &transport));
  Conformance(*transport).Meet();
  transport->Close(true, 5.0);
}

RT_TEST(fifty_times_open_and_closed) {
  if (mpi_path.empty()) return;
  for (int cycle = 0; cycle < 50; ++cycle) {
    std::unique_ptr<Transport> transport = OpenWorld();
    Conformance(*transport).Meet();
    transport->Close(true, 5.0);
  }
}

// The library may give the communicator of the second the number that the first one's had.
RT_TEST(a_frame_that_nobody_took_does_not_reach_the_next_transport) {
  if (mpi_path.empty()) return;
  for (int cycle = 0; cycle < 4; ++cycle) {
    std::unique_ptr<Transport> first = OpenWorld();
    const int ranks = first->size();
    if (first->rank() == 0) {
      const timespec pause = {0, 200000000};  // the others close at once
      nanosleep(&pause, nullptr);
      for (int to = 0; to < ranks; ++to) RT_REQUIRE_OK(first->SendFrame(to, "late"));
    }
    first->Close(true, 5.0);
    std::unique_ptr<Transport> second = OpenWorld();
    Conformance(*second).NothingIsLeft();
    second->Close(true, 5.0);
  }
}

RT_TEST(two_transports_do_not_mix) {
  if (mpi_path.empty()) return;
  std::unique_ptr<Transport> first = OpenWorld(), second = OpenWorld();
  const int me = first->rank();
  RT_REQUIRE_OK(first->SendFrame(me, "first"));
  RT_REQUIRE_OK(second->SendFrame(me, "second"));
  RT_CHECK_EQ(Conformance(*second).AwaitFrame(me), std::string("second"));
  RT_CHECK_EQ(Conformance(*first).AwaitFrame(me), std::string("first"));
  first->Close(true, 5.0);
  second->Close(true, 5.0);
}

RT_TEST(unclean_close_gives_up_posted_receives) {
  if (mpi_path.empty()) return;
  std::unique_ptr<Transport> transport = OpenWorld();
  std::vector<char> memory(1 << 20);
  Wire::Ticket ticket;
  RT_REQUIRE_OK(transport->StartReceive(transport->rank(), 1, memory.data(), memory.size(), &ticket));
  RT_CHECK(transport->Busy());
  transport->Close(false, 0.1);
  transport.reset();
}

RT_TEST(a_message_longer_than_expected_is_an_error) {
  if (mpi_path.empty()) return;
  std::unique_ptr<Transport> transport = OpenWorld();
  const int ranks = transport->size(), me = transport->rank();
  if (ranks == 1)
    return transport->Close(true, 5.0);  // MPICH reports an error of a message to oneself by ending the process
  const std::string sent(100, 'x');
  char received[50];
  Wire::Ticket send, receive;
  RT_REQUIRE_OK(transport->StartSend((me + 1) % ranks, 9, sent.data(), sent.size(), &send));
  Conformance(*transport).Meet();
  RT_REQUIRE_OK(transport->StartReceive((me + ranks - 1) % ranks, 9, received, sizeof received, &receive));
  Status status;
  bool complete = false;
  const Nanoseconds deadline = DeadlineAfter(Conformance::kPatienceSeconds);
  while (status.ok() && !complete && Now() < deadline) status = transport->Test(receive, &complete);
  RT_CHECK_EQ(status.code(), StatusCode::kInternal);
  RT_CHECK(Contains(status.message(), "receive a message of 50 bytes, tag 9, from rank"));
  RT_CHECK(Contains(status.message(), "Library: "));
  Conformance(*transport).AwaitMessage(send);
  transport->Close(true, 5.0);
}

// Under Open MPI's fault tolerance (mpirun --with-ft ulfm); elsewhere MPI ends the job. The process ends here, because
// MPI_Finalize may wait for the rank that was killed.
RT_TEST(a_killed_rank_is_an_event_with_the_words_of_mpi) {
  if (std::getenv("RT_TEST_KILL_LAST_RANK") == nullptr) return;
  std::unique_ptr<Transport> transport = OpenWorld();
  const int victim = transport->size() - 1;
  Conformance(*transport).Meet();
  if (transport->rank() == victim) raise(SIGKILL);
  char received[50];
  Wire::Ticket receive;
  bool complete = false;
  RT_REQUIRE_OK(transport->StartReceive(victim, 9, received, sizeof received, &receive));
  const auto look = [&] {
    RT_REQUIRE_OK(transport->Test(receive, &complete));
    RT_REQUIRE(!complete);
  };
  for (const Nanoseconds until = DeadlineAfter(2); Now() < until; usleep(1000)) look();
  LostPeer lost;
  RT_CHECK(!transport->TakeLostPeer(&lost));  // frames that had arrived come first
  RT_REQUIRE_EQ(Conformance(*transport).AwaitLostPeer(&lost), victim);
  std::printf("lost rank %d: %s\n", lost.rank, lost.cause.c_str());
  RT_CHECK_OK(transport->SendFrame(victim, "to nobody"));
  RT_CHECK_OK(transport->StartSend(victim, 9, received, sizeof received, &receive));
  look();
  transport->Abandon();
  transport->Close(false, 1.0);
  std::fflush(nullptr);
  _exit(check::Failures() == 0 ? 0 : 1);
}

RT_TEST(a_message_above_one_gibibyte_is_refused) {
  if (mpi_path.empty()) return;
  std::unique_ptr<Transport> transport = OpenWorld();
  Wire::Ticket ticket;
  RT_CHECK_EQ(transport->StartSend(0, 1, nullptr, (size_t{1} << 30) + 1, &ticket).code(), StatusCode::kInvalidArgument);
  transport->Close(true, 5.0);
}

RT_TEST(a_transport_that_outlives_mpi_touches_nothing) {
  if (mpi_path.empty()) return;
  std::unique_ptr<Transport> transport = OpenWorld();
  Conformance(*transport).NothingIsLeft();
  RT_REQUIRE_EQ(MpiFunction<int (*)()>("MPI_Finalize")(), 0);
  transport->Close(true, 5.0);
  transport.reset();
  CheckRefusal(StatusCode::kInvalidArgument, "finalised already");
}

int main(int argc, char** argv) {
  const char* path = std::getenv("RT_TEST_MPI_LIBRARY");
  mpi_path = path != nullptr ? path : "";
  return check::RunTests(argc, argv);
}
