// What the transport must know of an MPI library's binary interface, written by hand because no mpi.h is needed to
// build.
//
// There are three: that of Open MPI, whose handles are pointers to objects in the library; that of MPICH (with Intel
// MPI, MVAPICH, Cray MPICH, ParaStation), whose handles are integers; and the standard one of MPI 5, whose handles are
// small numbers in pointers, the same in every library (libmpi_abi.so). Each is one struct of facts; transport/mpi.cc
// is a template over it. tests/native/mpi_abi_check.cc compares these facts with the real headers.
#ifndef RINGTRAIN_TRANSPORT_MPI_ABI_H_
#define RINGTRAIN_TRANSPORT_MPI_ABI_H_

#include <cstddef>
#include <cstdint>

namespace ringtrain {

// Finds a symbol in the loaded MPI library; nullptr if there is none.
class MpiSymbols {
 public:
  virtual ~MpiSymbols() = default;
  virtual void* Find(const char* name) const = 0;
};

struct OpenMpiAbi {
  using Comm = void*;
  using Request = void*;
  using Datatype = void*;
  using Reduction = void*;
  using Errhandler = void*;
  struct MessageStatus {
    int source, tag, error;
    int cancelled;  // from here on the library's own
    size_t count;
  };
  static constexpr const char* kName = "Open MPI's ABI";
  static constexpr int kAnySource = -1;
  static constexpr int kTagUpperBound = 0;  // the attribute's key
  static constexpr int kThreadMultiple = 3;
  static constexpr int kMaxErrorText = 256;
  static constexpr int kUnknownError = 14, kTruncated = 15;  // classes of errors

  explicit OpenMpiAbi(const MpiSymbols& symbols)
      : world(symbols.Find("ompi_mpi_comm_world")),
        byte(symbols.Find("ompi_mpi_byte")),
        unsigned_number(symbols.Find("ompi_mpi_unsigned")),
        sum(symbols.Find("ompi_mpi_op_sum")),
        no_request(symbols.Find("ompi_request_null")),
        errors_return(symbols.Find("ompi_mpi_errors_return")) {}
  bool complete() const {
    return world != nullptr && byte != nullptr && unsigned_number != nullptr && sum != nullptr &&
           no_request != nullptr && errors_return != nullptr;
  }

  const Comm world;
  const Datatype byte, unsigned_number;
  const Reduction sum;
  const Request no_request;
  const Errhandler errors_return;
};

struct MpichAbi {
  using Comm = int;
  using Request = int;
  using Datatype = int;
  using Reduction = int;
  using Errhandler = int;
  struct MessageStatus {
    int count_low, count_high_and_cancelled;  // the library's own
    int source, tag, error;
  };
  static constexpr const char* kName = "MPICH's ABI";
  static constexpr int kAnySource = -2;
  static constexpr int kTagUpperBound = 0x64400001;
  static constexpr int kThreadMultiple = 3;
  static constexpr int kMaxErrorText = 512;
  static constexpr int kUnknownError = 13, kTruncated = 14;

  explicit MpichAbi(const MpiSymbols&) {}
  bool complete() const { return true; }

  const Comm world = 0x44000000;
  const Datatype byte = 0x4c00010d, unsigned_number = 0x4c000406;
  const Reduction sum = 0x58000003;
  const Request no_request = 0x2c000000;
  const Errhandler errors_return = 0x54000001;
};

struct StandardAbi {
  using Comm = void*;
  using Request = void*;
  using Datatype = void*;
  using Reduction = void*;
  using Errhandler = void*;
  struct MessageStatus {
    int source, tag, error;
    int internal[5];  // the library's own
  };
  static constexpr const char* kName = "the standard ABI of MPI 5";
  static constexpr int kAnySource = -1;
  static constexpr int kTagUpperBound = 501;
  static constexpr int kThreadMultiple = 4096;
  static constexpr int kMaxErrorText = 512;
  static constexpr int kUnknownError = 14, kTruncated = 15;

  explicit StandardAbi(const MpiSymbols&) {}
  bool complete() const { return true; }

  const Comm world = Handle(0x101);
  const Datatype byte = Handle(0x247), unsigned_number = Handle(0x20d);
  const Reduction sum = Handle(0x21);
  const Request no_request = Handle(0x180);
  const Errhandler errors_return = Handle(0x143);

 private:
  static void* Handle(uintptr_t number) { return reinterpret_cast<void*>(number); }
};

constexpr int kMpiSuccess = 0;  // in every MPI
constexpr size_t kMpiLongestVersionText = 8192;

// The functions in use: name after "MPI_", parameters. Types are those of the enclosing struct.
#define RT_MPI_FUNCTIONS(FUNCTION)                                                                                   \
  FUNCTION(Query_thread, (int* provided))                                                                            \
  FUNCTION(Comm_rank, (Comm comm, int* rank))                                                                        \
  FUNCTION(Comm_size, (Comm comm, int* size))                                                                        \
  FUNCTION(Comm_idup, (Comm comm, Comm * duplicate, Request * request))                                              \
  FUNCTION(Comm_free, (Comm * comm))                                                                                 \
  FUNCTION(Comm_set_errhandler, (Comm comm, Errhandler handler))                                                     \
  FUNCTION(Comm_get_attr, (Comm comm, int key, void* value, int* found))                                             \
  FUNCTION(Isend, (const void* data, int count, Datatype type, int to, int tag, Comm comm, Request* request))        \
  FUNCTION(Irecv, (void* data, int count, Datatype type, int from, int tag, Comm comm, Request* request))            \
  FUNCTION(Ireduce_scatter_block,                                                                                    \
           (const void* from, void* to, int count, Datatype type, Reduction reduction, Comm comm, Request* request)) \
  FUNCTION(Test, (Request * request, int* complete, MessageStatus* status))                                          \
  FUNCTION(Get_count, (const MessageStatus* status, Datatype type, int* count))                                      \
  FUNCTION(Cancel, (Request * request))                                                                              \
  FUNCTION(Error_class, (int code, int* error_class))                                                                \
  FUNCTION(Error_string, (int code, char* text, int* length))

template <typename Abi>
struct MpiFunctions {
  using Comm = typename Abi::Comm;
  using Request = typename Abi::Request;
  using Datatype = typename Abi::Datatype;
  using Reduction = typename Abi::Reduction;
  using Errhandler = typename Abi::Errhandler;
  using MessageStatus = typename Abi::MessageStatus;

#define RT_MPI_POINTER(name, parameters) int(*name) parameters = nullptr;
  RT_MPI_FUNCTIONS(RT_MPI_POINTER)
#undef RT_MPI_POINTER

  // Fills the table; the name of the first function that is missing, nullptr if none is.
  const char* Load(const MpiSymbols& symbols) {
#define RT_MPI_LOAD(name, parameters)                                     \
  name = reinterpret_cast<int(*) parameters>(symbols.Find("MPI_" #name)); \
  if (name == nullptr) return "MPI_" #name;
    RT_MPI_FUNCTIONS(RT_MPI_LOAD)
#undef RT_MPI_LOAD
    return nullptr;
  }
};

}  // namespace ringtrain
#endif  // RINGTRAIN_TRANSPORT_MPI_ABI_H_
