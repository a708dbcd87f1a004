#include "transport/mpi_library.h"

#include <dlfcn.h>
#include <link.h>

#include <cstring>
#include <sstream>
#include <vector>

namespace ringtrain {
namespace {

const char* BaseName(const char* path) {
  const char* slash = std::strrchr(path, '/');
  return slash != nullptr ? slash + 1 : path;
}

// A handle for an object that is loaded already and from which MPI can be reached; nullptr if it is not such an object.
void* OpenLoaded(const char* path) {
  void* object = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
  if (object != nullptr && dlsym(object, "MPI_Isend") != nullptr) return object;
  if (object != nullptr) dlclose(object);
  return nullptr;
}

// Paths of the loaded objects that are called libmpi-something.
std::vector<std::string> LoadedMpiObjects() {
  std::vector<std::string> paths;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* found) {
        if (std::strncmp(BaseName(info->dlpi_name), "libmpi", 6) == 0)
          static_cast<std::vector<std::string>*>(found)->push_back(info->dlpi_name);
        return 0;
      },
      &paths);
  return paths;
}

void* FindLoadedMpi(const std::string& library) {
  if (!library.empty())
    if (void* object = OpenLoaded(library.c_str())) return object;
  for (const std::string& path : LoadedMpiObjects())
    if (void* object = OpenLoaded(path.c_str())) return object;
  return nullptr;
}

bool HasMpichAbi(const std::string& version) {
  for (const char* name : {"MPICH", "Intel(R) MPI", "MVAPICH", "ParaStation"})
    if (version.find(name) != std::string::npos) return true;
  return false;
}

// The first line, with single spaces: version texts are laid out as tables.
std::string FirstLine(const std::string& text) {
  std::istringstream words(text.substr(0, text.find('\n')));
  std::string line, word;
  while (words >> word) line += (line.empty() ? "" : " ") + word;
  return line;
}

}  // namespace

Status MpiLibrary::Open(const std::string& library, std::unique_ptr<MpiLibrary>* opened) {
  void* object = FindLoadedMpi(library);
  if (object == nullptr)
    return Status::InvalidArgument(
        "init of MPI from '" + library +
        "': expected a loaded object that brings MPI but found none. Import mpi4py.MPI first.");
  std::unique_ptr<MpiLibrary> self(new MpiLibrary(object));
  RT_TRY(self->Identify());
  const auto initialized = reinterpret_cast<int (*)(int*)>(self->Find("MPI_Initialized"));
  int flag = 0;
  if (initialized == nullptr || initialized(&flag) != kMpiSuccess || flag == 0)
    return Status::InvalidArgument(
        "init of MPI from '" + self->path_ +
        "': expected an initialised MPI but MPI_Init has not been called. Import mpi4py.MPI first.");
  if (self->finalized())
    return Status::InvalidArgument("init of MPI from '" + self->path_ +
                                   "': expected a running MPI but it is finalised already. Start a new process.");
  *opened = std::move(self);
  return {};
}

MpiLibrary::~MpiLibrary() { dlclose(object_); }

void* MpiLibrary::Find(const char* name) const { return dlsym(object_, name); }

bool MpiLibrary::finalized() const {
  const auto query = reinterpret_cast<int (*)(int*)>(Find("MPI_Finalized"));
  int flag = 1;
  return query == nullptr || query(&flag) != kMpiSuccess || flag != 0;
}

Status MpiLibrary::Identify() {
  Dl_info where;
  if (dladdr(Find("MPI_Isend"), &where) != 0) path_ = where.dli_fname;
  const auto version = reinterpret_cast<int (*)(char*, int*)>(Find("MPI_Get_library_version"));
  std::vector<char> text(kMpiLongestVersionText, '\0');
  int length = 0;
  if (version == nullptr || version(text.data(), &length) != kMpiSuccess) text[0] = '\0';
  const std::string whole(text.data(), strnlen(text.data(), text.size()));
  version_ = FirstLine(whole);
  if (HasStandardAbi()) {
    family_ = Family::kStandard;
    return {};
  }
  if (Find("ompi_mpi_comm_world") != nullptr) {
    family_ = Family::kOpenMpi;
    return {};
  }
  if (HasMpichAbi(whole)) {
    family_ = Family::kMpich;
    return {};
  }
  return Status::Unsupported("init of MPI from '" + path_ +
                             "': expected Open MPI's ABI, MPICH's or the standard one of MPI 5 but found '" + version_ +
                             "'. Use an mpi4py that is built for one of them.");
}

// A library has one ABI; of MPI 5 it says itself whether that is the standard's, else its version of that is -1.
bool MpiLibrary::HasStandardAbi() const {
  const auto query = reinterpret_cast<int (*)(int*, int*)>(Find("MPI_Abi_get_version"));
  int major = -1, minor = -1;
  return query != nullptr && query(&major, &minor) == kMpiSuccess && major > 0;
}

}  // namespace ringtrain
