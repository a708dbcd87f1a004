// An MPI of one rank with MPICH's ABI, whose receives never come: what it does with those that are withdrawn is told by
// their tags. A matched one, of which a peer's hardware may still write the bytes, can be cancelled by no MPI.
#include <map>
#include <string>

namespace {

constexpr int kSuccess = 0, kNoRequest = 0x2c000000, kThreadMultiple = 3;
constexpr int kMatched = 7;  // the tag of receives that cannot be cancelled any more
int highest_tag = 1 << 30;

struct Receive {
  int tag;
  bool cancelled = false;
};
std::map<int, Receive> receives;  // by request; others are complete
int next_request = 1;

}  // namespace

#define RT_FAKE extern "C" __attribute__((visibility("default"))) int

RT_FAKE MPI_Initialized(int* flag) { return *flag = 1, kSuccess; }
RT_FAKE MPI_Finalized(int* flag) { return *flag = 0, kSuccess; }
RT_FAKE MPI_Get_library_version(char* text, int* length) {
  const std::string version = "MPICH of the tests";
  *length = static_cast<int>(version.copy(text, version.size()));
  text[*length] = '\0';
  return kSuccess;
}
RT_FAKE MPI_Query_thread(int* provided) { return *provided = kThreadMultiple, kSuccess; }
RT_FAKE MPI_Comm_rank(int, int* rank) { return *rank = 0, kSuccess; }
RT_FAKE MPI_Comm_size(int, int* size) { return *size = 1, kSuccess; }
RT_FAKE MPI_Comm_idup(int comm, int* duplicate, int* request) {
  *duplicate = comm + 1;
  *request = next_request++;
  return kSuccess;
}
RT_FAKE MPI_Comm_free(int*) { return kSuccess; }
RT_FAKE MPI_Comm_set_errhandler(int, int) { return kSuccess; }
RT_FAKE MPI_Comm_get_attr(int, int, void* value, int* found) {
  *static_cast<int**>(value) = &highest_tag;
  return *found = 1, kSuccess;
}
RT_FAKE MPI_Isend(const void*, int, int, int, int, int, int* request) { return *request = next_request++, kSuccess; }
RT_FAKE MPI_Irecv(void*, int, int, int, int tag, int, int* request) {
  receives[*request = next_request++] = {tag};
  return kSuccess;
}
RT_FAKE MPI_Ireduce_scatter_block(const void*, void*, int, int, int, int, int* request) {
  return *request = next_request++, kSuccess;
}
RT_FAKE MPI_Test(int* request, int* complete, void*) {
  const auto receive = receives.find(*request);
  *complete = receive == receives.end() || (receive->second.cancelled && receive->second.tag != kMatched);
  if (*complete == 0) return kSuccess;
  if (receive != receives.end()) receives.erase(receive);
  return *request = kNoRequest, kSuccess;
}
RT_FAKE MPI_Get_count(const void*, int, int* count) { return *count = 0, kSuccess; }
RT_FAKE MPI_Cancel(int* request) { return receives.at(*request).cancelled = true, kSuccess; }
RT_FAKE MPI_Error_class(int code, int* error_class) { return *error_class = code, kSuccess; }
RT_FAKE MPI_Error_string(int, char*, int* length) { return *length = 0, kSuccess; }

// Of the test: how many receives this MPI holds.
RT_FAKE fake_mpi_receives() { return static_cast<int>(receives.size()); }
