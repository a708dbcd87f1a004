#include "gpu/cross_group.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

namespace ringtrain {
namespace {

// One member from each host; ranks are global, as everywhere.
Topology Across(const Topology& set) {
  std::vector<int> ranks;
  for (const std::vector<int>& host : set.hosts) ranks.push_back(set.members[host[set.my_local()]]);
  std::vector<int> host_of(*std::max_element(ranks.begin(), ranks.end()) + 1);
  std::iota(host_of.begin(), host_of.end(), 0);
  return MakeTopology(std::move(ranks), set.members[set.me], host_of);
}

}  // namespace

Status CrossGroup::Open(const Group& set, const Options& options, std::unique_ptr<CrossGroup>* opened) {
  std::unique_ptr<CrossGroup> across(new CrossGroup);
  Group& group = across->group_;
  group.process_set = set.process_set;
  group.lane = set.lane + Group::kMaxGroups;
  group.topology = Across(set.topology);
  group.geometry = MakeGeometry(group.topology, static_cast<size_t>(options.chunk_bytes),
                                static_cast<size_t>(options.shared_memory_bytes));
  group.wire = set.wire;
  group.counters = set.counters;
  across->alone_ = OpenProcessMemory(MakeProcessHost(1), 0);
  char* window;
  RT_TRY(across->alone_->MapWindow(group.process_set, 1, group.geometry.Bytes(1), &window));
  group.window = Window(window, group.geometry, 1);
  *opened = std::move(across);
  return {};
}

}  // namespace ringtrain
