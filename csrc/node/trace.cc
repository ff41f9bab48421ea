// SPDX-License-Identifier: Apache-2.0
#include "node/trace.h"

#include <cstdint>
#include <string>

namespace bps::node {
namespace {

// These are BytePS's defaults, in force where its way of switching the trace on is used.
constexpr std::uint32_t kFirst = 10;
constexpr std::uint32_t kLast = 20;

std::string trace_file(const TraceSettings& settings, const van::Node& self, std::uint32_t local_rank,
                       std::uint32_t epoch) {
  const bool as_byteps = settings.folder.empty();
  std::string file = (as_byteps ? settings.byteps_folder : settings.folder) + "/";
  if (self.worker_rank < 0) {
    file += "server-" + std::to_string(self.server_rank);
  } else if (as_byteps) {
    file += std::to_string(local_rank);
  } else {
    file += "worker-" + std::to_string(self.worker_rank);
  }
  file += epoch == 1 ? "/comm.json" : "/comm-" + std::to_string(epoch) + ".json";
  return file;
}

}  // namespace

std::unique_ptr<TraceWriter> make_trace(const TraceSettings& settings) {
  if (!settings.is_on()) return nullptr;
  TracedRounds rounds;
  if (settings.folder.empty()) rounds = {.first = kFirst, .last = kLast};
  rounds.first = settings.first_round.value_or(rounds.first);
  rounds.last = settings.last_round.value_or(rounds.last);
  return std::make_unique<TraceWriter>(rounds);
}

TraceWriter::Process traced_process(const Settings& settings, const van::Node& self, const van::Membership& members) {
  TraceWriter::Process process;
  process.file = trace_file(settings.trace, self, settings.job.local_rank.value_or(0), members.epoch);
  if (self.worker_rank >= 0) process.name = "worker " + std::to_string(self.worker_rank);
  if (self.server_rank >= 0)
    process.name += (process.name.empty() ? "server " : " and server ") + std::to_string(self.server_rank);
  process.host = self.host;
  process.worker_rank = self.worker_rank;
  process.server_rank = self.server_rank;
  for (const van::Node& node : members.nodes) process.nodes.emplace_back(node.id, members.name_of(node.id));
  return process;
}

}  // namespace bps::node
