// The MPI library that this process has loaded already: where its functions are, which ABI it has, what state it is in.
//
// mpi4py chooses, loads and initialises MPI; nothing is loaded or initialised here. Used by transport/mpi.cc only.
#ifndef RINGTRAIN_TRANSPORT_MPI_LIBRARY_H_
#define RINGTRAIN_TRANSPORT_MPI_LIBRARY_H_

#include <memory>
#include <string>

#include "base/status.h"
#include "transport/mpi_abi.h"

namespace ringtrain {

class MpiLibrary : public MpiSymbols {
 public:
  enum class Family { kOpenMpi, kMpich, kStandard };

  // library: a loaded shared object with MPI among its dependencies; if MPI cannot be found from there, any loaded
  // libmpi is taken. Refused if there is none, if its ABI is not one of the three, or if MPI is not initialised or
  // finalised already.
  static Status Open(const std::string& library, std::unique_ptr<MpiLibrary>* opened);
  ~MpiLibrary() override;

  void* Find(const char* name) const override;
  Family family() const { return family_; }
  bool finalized() const;
  // First line of the library's version text.
  const std::string& version() const { return version_; }
  // The file that holds MPI's functions.
  const std::string& path() const { return path_; }

 private:
  explicit MpiLibrary(void* object) : object_(object) {}
  Status Identify();
  bool HasStandardAbi() const;

  void* const object_;  // from dlopen
  Family family_ = Family::kMpich;
  std::string version_, path_;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_TRANSPORT_MPI_LIBRARY_H_
