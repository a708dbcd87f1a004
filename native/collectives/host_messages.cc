#include "collectives/host_messages.h"

#include <utility>

namespace ringtrain {

HostMessages::HostMessages(Group* group, std::vector<int> leaders) : group_(group), leaders_(std::move(leaders)) {}

Status HostMessages::Receive(int host, char* into, size_t bytes) {
  if (bytes == 0) return {};
  Wire::Ticket ticket;
  RT_TRY(group_->wire->StartReceive(RankOf(host), tag_, into, bytes, &ticket));
  tickets_.push_back(ticket);
  return {};
}

Status HostMessages::Send(int host, const char* data, size_t bytes) {
  if (bytes == 0) return {};
  Wire::Ticket ticket;
  RT_TRY(group_->wire->StartSend(RankOf(host), tag_, data, bytes, &ticket));
  tickets_.push_back(ticket);
  group_->counters->Add(Counter::kWireBytesSent, static_cast<int64_t>(bytes));
  return {};
}

Status HostMessages::TestAll(bool* complete) {
  while (!tickets_.empty()) {
    RT_TRY(group_->wire->Test(tickets_.back(), complete));
    if (!*complete) return {};
    tickets_.pop_back();
  }
  *complete = true;
  return {};
}

}  // namespace ringtrain
