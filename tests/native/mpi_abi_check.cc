// Compares transport/mpi_abi.h with the mpi.h of an installed MPI; with -DRT_STANDARD_ABI with its mpi_abi.h, which is
// that of MPI 5 and the same everywhere.
//
// Constants, layouts and signatures are checked while compiling. Run without arguments and without mpirun, the program
// checks the handles, which some libraries know only at run time, prints what it has compared, and exits with 0 if all
// agree.
#if defined(RT_STANDARD_ABI)
#include <mpi_abi.h>
#else
#include <mpi.h>
#endif

#include <dlfcn.h>

#include <cstddef>
#include <cstdio>
#include <cstring>

#include "signatures.h"
#include "transport/mpi_abi.h"
#include "transport/wire.h"

using namespace ringtrain;

#if defined(RT_STANDARD_ABI)
using Abi = StandardAbi;
static_assert(MPI_ABI_VERSION == 1, "MPI_ABI_VERSION");
#elif defined(OPEN_MPI)
using Abi = OpenMpiAbi;
#elif defined(MPICH_VERSION)
using Abi = MpichAbi;
#else
#error "neither Open MPI's nor MPICH's mpi.h"
#endif

static_assert(MPI_SUCCESS == kMpiSuccess, "MPI_SUCCESS");
static_assert(MPI_ANY_SOURCE == Abi::kAnySource, "MPI_ANY_SOURCE");
static_assert(MPI_TAG_UB == Abi::kTagUpperBound, "MPI_TAG_UB");
static_assert(MPI_THREAD_MULTIPLE == Abi::kThreadMultiple, "MPI_THREAD_MULTIPLE");
static_assert(MPI_MAX_ERROR_STRING <= Abi::kMaxErrorText, "MPI_MAX_ERROR_STRING");
static_assert(MPI_ERR_UNKNOWN == Abi::kUnknownError, "MPI_ERR_UNKNOWN");
static_assert(MPI_ERR_TRUNCATE == Abi::kTruncated, "MPI_ERR_TRUNCATE");
static_assert(MPI_ERR_BUFFER < MPI_ERR_TRUNCATE && MPI_ERR_COUNT < MPI_ERR_TRUNCATE && MPI_ERR_TAG < MPI_ERR_TRUNCATE &&
                  MPI_ERR_COMM < MPI_ERR_TRUNCATE && MPI_ERR_RANK < MPI_ERR_TRUNCATE &&
                  MPI_ERR_ARG < MPI_ERR_TRUNCATE && MPI_ERR_OTHER > MPI_ERR_TRUNCATE &&
                  MPI_ERR_INTERN > MPI_ERR_TRUNCATE,
              "classes up to MPI_ERR_TRUNCATE are the caller's mistakes");
static_assert(MPI_MAX_LIBRARY_VERSION_STRING <= kMpiLongestVersionText, "MPI_MAX_LIBRARY_VERSION_STRING");

static_assert(sizeof(MPI_Comm) == sizeof(Abi::Comm), "MPI_Comm");
static_assert(sizeof(MPI_Request) == sizeof(Abi::Request), "MPI_Request");
static_assert(sizeof(MPI_Datatype) == sizeof(Abi::Datatype), "MPI_Datatype");
static_assert(sizeof(MPI_Op) == sizeof(Abi::Reduction), "MPI_Op");
static_assert(sizeof(MPI_Errhandler) == sizeof(Abi::Errhandler), "MPI_Errhandler");
static_assert(sizeof(MPI_Status) == sizeof(Abi::MessageStatus), "MPI_Status");
static_assert(alignof(MPI_Status) == alignof(Abi::MessageStatus), "MPI_Status");
static_assert(offsetof(MPI_Status, MPI_SOURCE) == offsetof(Abi::MessageStatus, source), "MPI_SOURCE");
static_assert(offsetof(MPI_Status, MPI_TAG) == offsetof(Abi::MessageStatus, tag), "MPI_TAG");
static_assert(offsetof(MPI_Status, MPI_ERROR) == offsetof(Abi::MessageStatus, error), "MPI_ERROR");

using Functions = MpiFunctions<Abi>;
#define RT_CHECK_SIGNATURE(name, parameters)                                                             \
  static_assert(SameSignature(static_cast<decltype(&MPI_##name)>(nullptr), decltype(Functions::name){}), \
                "MPI"                                                                                    \
                "_" #name);
RT_MPI_FUNCTIONS(RT_CHECK_SIGNATURE)
#undef RT_CHECK_SIGNATURE

namespace {

class LinkedSymbols : public MpiSymbols {
 public:
  void* Find(const char* name) const override { return dlsym(RTLD_DEFAULT, name); }
};

template <typename Real, typename Ours>
int Compare(const char* name, Real real, Ours ours) {
  static_assert(sizeof real == sizeof ours, "handles of one size");
  const bool same = std::memcmp(&real, &ours, sizeof real) == 0;
  std::printf("%s %s\n", same ? "same  " : "DIFFER", name);
  return same ? 0 : 1;
}

}  // namespace

int main() {
  const LinkedSymbols symbols;
  const Abi abi(symbols);
  int differences = 0;
  differences += Compare("MPI_COMM_WORLD", MPI_COMM_WORLD, abi.world);
  differences += Compare("MPI_BYTE", MPI_BYTE, abi.byte);
  differences += Compare("MPI_UNSIGNED", MPI_UNSIGNED, abi.unsigned_number);
  differences += Compare("MPI_SUM", MPI_SUM, abi.sum);
  differences += Compare("MPI_REQUEST_NULL", MPI_REQUEST_NULL, abi.no_request);
  differences += Compare("MPI_ERRORS_RETURN", MPI_ERRORS_RETURN, abi.errors_return);
  Functions functions;
  const char* missing = functions.Load(symbols);
  if (missing != nullptr) std::printf("MISSING %s\n", missing);
  char version[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  MPI_Get_library_version(version, &length);
  std::printf("%s, header MPI %d.%d, %s\n", Abi::kName, MPI_VERSION, MPI_SUBVERSION, version);
  return differences == 0 && missing == nullptr && abi.complete() ? 0 : 1;
}
