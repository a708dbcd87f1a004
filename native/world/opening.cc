#include "world/opening.h"

#include <sys/random.h>
#include <unistd.h>

#include <map>
#include <string>

#include "base/bytes.h"
#include "base/clock.h"
#include "base/digest.h"
#include "base/ranks.h"
#include "world/placement.h"
#include "world/version.h"

namespace ringtrain {
namespace {

std::string HostName() {
  char name[256] = "";
  return gethostname(name, sizeof name - 1) == 0 ? name : "unknown";
}

// Of the tables that frames follow: two builds of one version, such as checkouts, may differ in a row, and would read
// each other's frames wrongly. Words for people do not count.
std::string TablesDigest(const Options& options) {
  std::string text;
  for (const char* table : {"dtypes", "operations", "attributes", "reductions", "compressions", "status"})
    text += TableText(table);
  for (const auto& agreed : options.Agreed()) text += agreed.first + "\n";
  uint64_t digest = DigestOf(text.data(), text.size(), 0);
  std::string digits;
  for (; digits.size() < 16; digest /= 16) digits += "0123456789abcdef"[digest % 16];
  return digits;
}

struct Fact {
  std::string name, value;
  bool of_build;  // which no option changes
};

// What must be equal on all ranks before they can work together. Those of the build first: in another one there may be
// more or fewer of the others.
std::vector<Fact> StartFacts(const Options& options) {
  std::vector<Fact> facts = {{"ringtrain version", kVersion, true},
                             {"digest of ringtrain's tables", TablesDigest(options), true}};
  for (auto& [name, value] : options.Agreed()) facts.push_back({name, value, false});
  return facts;
}

Status CompareFact(const Fact& fact, const std::vector<std::string>& by_rank) {
  std::map<std::string, std::vector<int>> ranks_of;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) ranks_of[by_rank[rank]].push_back(static_cast<int>(rank));
  if (ranks_of.size() == 1) return {};
  std::string text = "init: " + fact.name + " must be the same on all ranks, but is ";
  for (auto group = ranks_of.begin(); group != ranks_of.end(); ++group)
    text +=
        std::string(group == ranks_of.begin() ? "" : " and ") + "'" + group->first + "' on " + RanksText(group->second);
  if (fact.of_build) return Status::Mismatch(text + ". Install the same ringtrain everywhere.");
  return Status::Mismatch(text + ". Set it alike everywhere.");
}

// Every rank compares the same facts in the same order, so all raise the same text or none does.
Status AgreeOnStart(Rendezvous& rendezvous, const Options& options, Nanoseconds deadline, World* world) {
  Encoder encoder;
  uint32_t epoch = 0;
  if (getrandom(&epoch, sizeof epoch, 0) != sizeof epoch) epoch = static_cast<uint32_t>(Now());
  encoder.Unsigned(epoch);
  encoder.Text(HostName());
  encoder.Text(options.site.empty() ? SiteInLayout(options.host_layout, rendezvous.rank()) : options.site);
  const auto facts = StartFacts(options);
  for (const Fact& fact : facts) encoder.Text(fact.value);
  std::vector<std::string> texts;
  RT_TRY(rendezvous.Allgather(encoder.Take(), deadline, &texts));

  std::vector<Decoder> decoders;
  for (const std::string& text : texts) decoders.emplace_back(text);
  for (size_t rank = 0; rank < decoders.size(); ++rank) {
    uint32_t theirs = static_cast<uint32_t>(decoders[rank].Unsigned());
    if (rank == 0) world->epoch = theirs;
    world->host_names.push_back(decoders[rank].Text());
    world->site_of.push_back(decoders[rank].Text());
  }
  for (const Fact& fact : facts) {
    std::vector<std::string> by_rank;
    for (Decoder& decoder : decoders) by_rank.push_back(decoder.Text());
    RT_TRY(CompareFact(fact, by_rank));
  }
  return {};
}

// All ranks know all sites, so all say the same.
Status CompareSites(const World& world) {
  for (const std::vector<int>& ranks : world.hosts)
    for (int rank : ranks) {
      const std::string &site = world.site_of[rank], &first = world.site_of[ranks[0]];
      if (site != first)
        return Status::Mismatch("init: option site must be the same on all ranks of a host, but is '" + first +
                                "' on rank " + std::to_string(ranks[0]) + " and '" + site + "' on rank " +
                                std::to_string(rank) + " of host '" + world.host_names[rank] +
                                "'. Set RINGTRAIN_SITE alike there.");
    }
  return {};
}

}  // namespace

Status OpenWorld(Rendezvous& rendezvous, const Options& options, Meeting* meeting) {
  const Nanoseconds deadline = DeadlineAfter(options.start_timeout_seconds);
  World* const world = &meeting->world;
  world->rank = rendezvous.rank();
  world->size = rendezvous.size();
  RT_TRY(AgreeOnStart(rendezvous, options, deadline, world));
  auto window_size = [&](const World& found) {
    std::vector<int> everyone;
    for (int rank = 0; rank < found.size; ++rank) everyone.push_back(rank);
    const Topology topology = TopologyFor(found, options, everyone);
    return GeometryFor(topology, options).Bytes(topology.local_count());
  };
  RT_TRY(rendezvous.Meet(window_size, deadline, meeting));
  RT_TRY(CompareSites(*world));
  if (options.algorithm == "shared_memory" && world->hosts.size() > 1)
    return Status::InvalidArgument("option algorithm: shared_memory needs all ranks on one host, but found " +
                                   std::to_string(world->hosts.size()) + " hosts. Use auto or hierarchical.");
  return {};
}

}  // namespace ringtrain
