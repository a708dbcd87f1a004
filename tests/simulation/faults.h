// Faults of a plan: hosts that go down or are cut off, processes that end, stop, wake too late or raise, connections
// that are lost. Drawn here, and judged by what the promise says: whom they make silent, who may be called dead for it
// and in which words, and by when everyone must know. The generator draws them, the world lets them strike, the judge
// asks what may follow.
#ifndef RINGTRAIN_TESTS_SIMULATION_FAULTS_H_
#define RINGTRAIN_TESTS_SIMULATION_FAULTS_H_

#include <string>
#include <vector>

#include "plan.h"

namespace ringtrain {
namespace simulation {

// Puts the plan's ranks on hosts and, in some plans, adds one fault that lasts, or has the wire lose a connection;
// everything from streams of their own.
void DrawHosts(Plan* plan);
void DrawLastingFault(Plan* plan);
void DrawLoss(Plan* plan);
// In some plans without other faults: a program that ends by the first error that it is told.
void DrawUncaught(Plan* plan);

// No rank ends otherwise than by an error of its program.
bool EndsByErrorsAlone(const Plan& plan);

// The world must end of it.
bool IsDeadly(const Plan& plan, const Fault& fault);
// From the moment it strikes: when all living ranks must have ended, but for those that it stops; these must after they
// wake.
// told: by the kernel of its host, or by the wire.
Nanoseconds TimeToEnd(const Plan& plan, const Fault& fault, bool told);
Nanoseconds TimeToEndAfterWaking(const Plan& plan);

// When a rank that a freeze stops stands still, from the fault's own time.
Nanoseconds Jitter(const Plan& plan, const Fault& fault, int rank);

// What the wire says of a connection that is lost.
extern const char* const kLossText;
// What a rank that raises tells the others.
std::string RaisedText(int rank);
// Why a rank may not be told this cause now, of a fault that struck at `struck`; empty if it may.
std::string Misfit(const Plan& plan, const Fault& fault, Nanoseconds struck, Nanoseconds now, const std::string& cause);

}  // namespace simulation
}  // namespace ringtrain
#endif  // RINGTRAIN_TESTS_SIMULATION_FAULTS_H_
