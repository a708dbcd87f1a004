// Transport over MPI: the ranks of a communicator that mpi4py has made.
#ifndef RINGTRAIN_TRANSPORT_MPI_H_
#define RINGTRAIN_TRANSPORT_MPI_H_

#include <cstdint>
#include <memory>
#include <string>

#include "transport/rendezvous.h"
#include "transport/transport.h"

namespace ringtrain {

// Opens a transport on a duplicate of `communicator`. All its ranks must call this; it waits for them up to
// timeout_seconds. library: path of a loaded object that brings MPI (mpi4py.MPI.__file__). communicator: its handle,
// the pointer or the integer, as mpi4py.MPI._handleof gives it. Refused if MPI is not initialised with thread level
// multiple.
Status OpenMpiTransport(const std::string& library, uintptr_t communicator, double timeout_seconds,
                        std::unique_ptr<Transport>* transport);

// The rendezvous of the communicator's ranks, likewise. layout: "2+2" pretends two hosts; empty: the real ones.
Status OpenMpiRendezvous(const std::string& library, uintptr_t communicator, double timeout_seconds,
                         const std::string& layout, std::unique_ptr<Rendezvous>* rendezvous);

}  // namespace ringtrain
#endif  // RINGTRAIN_TRANSPORT_MPI_H_
