// The window's geometry: the same on all members, within its bounds, and no two places overlap.
#include "collectives/window.h"

#include <numeric>

#include "check.h"

namespace ringtrain {
namespace {

Topology Hosts(const std::vector<int>& ranks_per_host, int me = 0) {
  std::vector<int> members, host_of_rank;
  for (size_t host = 0; host < ranks_per_host.size(); ++host)
    host_of_rank.insert(host_of_rank.end(), ranks_per_host[host], static_cast<int>(host));
  members.resize(host_of_rank.size());
  std::iota(members.begin(), members.end(), 0);
  return MakeTopology(members, me, host_of_rank);
}

const std::vector<std::vector<int>> kLayouts = {{1},    {2},       {4},          {64},     {1, 1}, {2, 2},
                                                {1, 3}, {8, 8, 8}, {1, 1, 1, 1}, {100, 3}, {1000}};

RT_TEST(topology_names_hosts_places_and_rings) {
  const Topology topology = MakeTopology({1, 3, 4, 6}, 4, {9, 5, 9, 9, 5, 9, 9});
  RT_CHECK(topology.hosts == (std::vector<std::vector<int>>{{0, 2}, {1, 3}}));
  RT_CHECK(topology.host_of == (std::vector<int>{0, 1, 0, 1}));
  RT_CHECK(topology.local_of == (std::vector<int>{0, 0, 1, 1}));
  RT_CHECK_EQ(topology.me, 2);
  RT_CHECK_EQ(topology.rings, 2);
  RT_CHECK_EQ(Hosts({1, 3}).rings, 1);
  RT_CHECK_EQ(Hosts({1, 3}).most_locals, 3);
}

RT_TEST(hosts_of_a_site_follow_each_other) {
  const auto of = [](const std::vector<std::string>& site_of_rank) {
    std::vector<int> ranks(site_of_rank.size());
    std::iota(ranks.begin(), ranks.end(), 0);
    return MakeTopology(ranks, 1, ranks, site_of_rank);
  };
  const Topology even = of({"a", "b", "b", "a"});
  RT_CHECK(even.hosts == (std::vector<std::vector<int>>{{0}, {3}, {1}, {2}}));
  RT_CHECK(even.host_of == (std::vector<int>{0, 2, 3, 1}));
  RT_CHECK_EQ(even.my_host(), 2);
  RT_CHECK(even.sites == (std::vector<int>{0, 2}));
  RT_CHECK_EQ(even.my_site(), 1);
  RT_CHECK_EQ(even.hosts_of_site(1), 2);
  const Topology uneven = of({"a", "b", "a"});
  RT_CHECK(uneven.hosts == (std::vector<std::vector<int>>{{0}, {2}, {1}}));
  RT_CHECK(uneven.sites == (std::vector<int>{0, 2}));
  RT_CHECK_EQ(uneven.hosts_of_site(0), 2);
  RT_CHECK_EQ(uneven.hosts_of_site(1), 1);
  RT_CHECK_EQ(of({"a", "", "b"}).site_count(), 3);
  RT_CHECK_EQ(of({"", "", ""}).site_count(), 1);
}

RT_TEST(geometry_is_the_same_on_every_member) {
  for (const std::vector<int>& layout : kLayouts)
    for (size_t chunk : {0, 1000, 100000}) {
      const int members = Hosts(layout).member_count();
      const WindowGeometry first = MakeGeometry(Hosts(layout, 0), chunk, 1 << 25),
                           last = MakeGeometry(Hosts(layout, members - 1), chunk, 1 << 25);
      RT_CHECK_EQ(first.chunk_bytes, last.chunk_bytes);
      RT_CHECK_EQ(first.result_bytes, last.result_bytes);
      RT_CHECK_EQ(first.chunk_slots, last.chunk_slots);
      RT_CHECK_EQ(first.result_slots, last.result_slots);
    }
}

RT_TEST(geometry_keeps_within_its_bound_unless_it_is_least) {
  for (const std::vector<int>& layout : kLayouts)
    for (size_t most : {size_t{65536}, size_t{1} << 20, size_t{1} << 25}) {
      const Topology topology = Hosts(layout);
      const WindowGeometry geometry = MakeGeometry(topology, 0, most);
      const size_t least = MakeGeometry(topology, 1, 1).chunk_bytes;
      RT_CHECK(geometry.chunk_bytes >= least);
      RT_CHECK(geometry.chunk_bytes == least || geometry.Bytes(topology.most_locals) <= most);
      RT_CHECK(least >= 8 * static_cast<size_t>(topology.member_count()));  // an element of every type for each member
      RT_CHECK_EQ(geometry.chunk_bytes % 64, size_t{0});
      RT_CHECK_EQ(geometry.result_bytes % 64, size_t{0});
      RT_CHECK(geometry.result_bytes * topology.rings >= geometry.chunk_bytes);
    }
}

RT_TEST(places_do_not_overlap) {
  const Topology topology = Hosts({3});
  const WindowGeometry geometry = MakeGeometry(topology, 4096, 1 << 25);
  std::vector<char> memory(geometry.Bytes(3) + 64);
  char* aligned = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
  Window window(aligned, geometry, 3);
  RT_CHECK(window.mapped());
  RT_CHECK(!Window().mapped());
  for (int local = 0; local < 3; ++local) {
    RT_CHECK_EQ(reinterpret_cast<uintptr_t>(&window.counters(local)) % 64, uintptr_t{0});
    for (int slot = 0; slot < geometry.chunk_slots; ++slot) {
      char* place = window.contribution(local, slot);
      RT_CHECK(place == window.contribution(local, slot + 7 * geometry.chunk_slots));
      for (size_t byte = 0; byte < geometry.chunk_bytes; ++byte) place[byte] += 1;
    }
    for (int slot = 0; slot < geometry.result_slots; ++slot) {
      char* place = window.result(local, slot);
      RT_CHECK(place == window.result(local, slot + 5 * geometry.result_slots));
      for (size_t byte = 0; byte < geometry.result_bytes; ++byte) place[byte] += 1;
    }
    window.counters(local).packed = 0x0101010101010101;  // the counters are places as well
    for (auto counter : {&StageCounters::reduced, &StageCounters::published, &StageCounters::consumed})
      window.counters(local).*counter = 0x0101010101010101;
  }
  size_t ones = 0;
  for (size_t byte = 0; byte < geometry.Bytes(3); ++byte) {
    RT_REQUIRE(aligned[byte] == 0 || aligned[byte] == 1);
    ones += aligned[byte];
  }
  RT_CHECK_EQ(ones + 3 * (sizeof(StageCounters) - 32), geometry.Bytes(3));
}

}  // namespace
}  // namespace ringtrain
