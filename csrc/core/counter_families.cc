// SPDX-License-Identifier: Apache-2.0
#include "core/counter_families.h"

#include <algorithm>
#include <string_view>

namespace bps {
namespace {

struct Row {
  std::string_view counter;
  std::string_view name;
  std::string_view label;  // with its value, tells the counters of one family apart
  std::string_view value;
  std::string_view help;
};

constexpr Row kRows[] = {
    {"data_writes", "bps_messages_sent_total", "plane", "data",
     "Writes on the data plane, and messages on the control plane."},
    {"control_messages", "bps_messages_sent_total", "plane", "control", ""},
    {"data_bytes", "bps_sent_bytes_total", "plane", "data",
     "Bytes written into peers' memory, or posted to peers that read them in place; and those of control messages."},
    {"control_bytes", "bps_sent_bytes_total", "plane", "control", ""},
    {"received_bytes", "bps_received_bytes_total", "", "",
     "Bytes of the contributions that servers of this process took, and of the results that its workers got, "
     "also where these are read or written in place."},
    {"forged", "bps_forged_messages_total", "", "",
     "Control messages with a wrong authentication code; each ended its connection."},
    {"copies", "bps_copies_total", "", "", "Extra copies of payload: staging, and copies between processes."},
    {"copied_bytes", "bps_copied_bytes_total", "", "", "Bytes of extra copies of payload."},
    {"device_copies_from", "bps_device_copies_total", "direction", "from",
     "Copies that GPUs made from tensors to the host, and back, by direction: from or to the GPU."},
    {"device_copies_to", "bps_device_copies_total", "direction", "to", ""},
    {"device_bytes_from", "bps_device_bytes_total", "direction", "from", "Bytes of these copies."},
    {"device_bytes_to", "bps_device_bytes_total", "direction", "to", ""},
    {"unwatched_bytes", "bps_unwatched_bytes_total", "", "",
     "Bytes of tensors that were copied for an RDMA device, because nobody tells when their memory is given back."},
    {"given_back", "bps_given_back_blocks_total", "", "",
     "Blocks of memory whose registration with an RDMA device was dropped, because pages of them were given back."},
    {"compressed_bytes", "bps_compressed_bytes_total", "", "",
     "Bytes of payloads and results that this worker sent or took compressed."},
    {"uncompressed_bytes", "bps_uncompressed_bytes_total", "", "",
     "Bytes that the same would have been without compression."},
    {"partitions", "bps_partitions_total", "", "", "Partitions finished on this worker."},
    {"operations", "bps_operations_total", "result", "complete",
     "Operations of this worker that are over, by result: complete or failed."},
    {"failed", "bps_operations_total", "result", "failed", ""},
    {"operation_bytes", "bps_operation_bytes_total", "", "", "Bytes of the tensors of complete operations."},
    {"credit_stalls", "bps_credit_stalls_total", "", "",
     "Times a loop had something to push and could not send it yet, mostly for want of a landing slot."},
    {"pace_stalls", "bps_pace_stalls_total", "", "",
     "Times a loop held a push to one server back, so that all servers of the operation stay in step."},
    {"pushes", "bps_pushes_total", "", "", "Contributions that servers of this process have accepted."},
    {"rounds", "bps_rounds_total", "", "", "Rounds summed and answered."},
    {"host_sums", "bps_host_sums_total", "", "", "Rounds of this host whose sum went on to a server."},
    {"summed_bytes", "bps_summed_bytes_total", "", "", "Bytes of the results of these rounds."},
    {"stale", "bps_stale_arrivals_total", "", "", "Arrivals refused: late, duplicate or malformed."},
    {"excess", "bps_excess_workers_total", "", "",
     "Workers lost because they kept more open than a worker can wait for."},
    {"overflow_slots", "bps_overflow_slots_total", "", "", "Slots granted beyond the window to break a deadlock."},
    {"paths_lost", "bps_paths_lost_total", "", "", "Lost paths of connections that have others."},
    {"repeated", "bps_repeated_writes_total", "", "",
     "Pushes and answers that a lost path had not delivered, and another path sent again."},
    {"wakeups", "bps_loop_wakeups_total", "", "", "Returns of a loop from sleep."},
};

}  // namespace

MetricFamilies counter_families(const std::vector<std::pair<std::string, std::uint64_t>>& counters) {
  MetricFamilies families;
  for (const Row& row : kRows) {
    const auto found = std::ranges::find_if(counters, [&](const auto& one) { return one.first == row.counter; });
    if (found == counters.end()) continue;
    if (families.empty() || families.back().name != row.name) {
      families.push_back({MetricFamily::Type::kCounter, std::string(row.name), std::string(row.help)});
    }
    Labels labels;
    if (!row.label.empty()) labels.emplace_back(row.label, row.value);
    families.back().add(static_cast<double>(found->second), std::move(labels));
  }
  return families;
}

}  // namespace bps
