// What the MPI transport does at the end of a world with receives that MPI does not give back, against tests/fakes/mpi.
#include <dlfcn.h>
#include <limits.h>
#include <unistd.h>

#include <memory>
#include <string>

#include "base/log.h"
#include "check.h"
#include "transport/mpi.h"

using namespace ringtrain;

namespace {

constexpr int kMatched = 7;   // as in the fake
constexpr int kOfFrames = 8;  // receives that the transport posts for frames

std::string FakeMpi() {
  char path[PATH_MAX] = "";
  const ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
  const std::string program(path, length > 0 ? static_cast<size_t>(length) : 0);
  return program.substr(0, program.rfind('/')) + "/fakes/libmpi-of-tests.so";
}

}  // namespace

RT_TEST(what_mpi_holds_at_the_end_is_told) {
  void* const mpi = dlopen(FakeMpi().c_str(), RTLD_NOW);
  RT_REQUIRE(mpi != nullptr);
  const auto receives = reinterpret_cast<int (*)()>(dlsym(mpi, "fake_mpi_receives"));
  for (int matched : {0, 2}) {
    const int before = receives();
    Log log;
    std::unique_ptr<Transport> transport;
    RT_REQUIRE_OK(OpenMpiTransport(FakeMpi(), 0x44000000, 10, &transport));
    transport->SetLog(&log);
    char memory[4][10];
    Wire::Ticket ticket;
    for (int i = 0; i < 4; ++i)
      RT_REQUIRE_OK(transport->StartReceive(0, i < matched ? kMatched : 3, memory[i], sizeof memory[i], &ticket));
    RT_CHECK_EQ(receives() - before, kOfFrames + 4);
    transport->Abandon();
    RT_CHECK_EQ(receives() - before, kOfFrames + matched);  // all that can be withdrawn are, whatever the others do
    std::string line;
    RT_CHECK_EQ(log.Next(&line), matched > 0);
    if (matched > 0)
      RT_CHECK_EQ(line.find("warning|rank 0: MPI must give back the memory of a world that has ended, but holds it for "
                            "2 messages that others had begun to send."),
                  size_t{0});
    transport->Close(false, 0);
  }
}
