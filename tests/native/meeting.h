// MeetAll: the ranks of a hub after their rendezvous, for tests that drive all of them from one thread.
#ifndef RINGTRAIN_TESTS_NATIVE_MEETING_H_
#define RINGTRAIN_TESTS_NATIVE_MEETING_H_

#include <memory>
#include <vector>

#include "check.h"
#include "transport/in_process.h"

namespace ringtrain {

inline std::vector<Meeting> MeetAll(const std::shared_ptr<Hub>& hub) {
  std::vector<Meeting> meetings(static_cast<size_t>(hub->size()));
  check::RunRanks(hub->size(), [&](int rank) {
    std::unique_ptr<Rendezvous> rendezvous;
    RT_REQUIRE_OK(Hub::Join(hub, rank, &rendezvous));
    Meeting& meeting = meetings[static_cast<size_t>(rank)];
    meeting.world.rank = rank;
    RT_REQUIRE_OK(rendezvous->Meet([](const World&) { return size_t{1} << 16; }, DeadlineAfter(60), &meeting));
  });
  return meetings;
}

}  // namespace ringtrain
#endif  // RINGTRAIN_TESTS_NATIVE_MEETING_H_
