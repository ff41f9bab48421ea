// SPDX-License-Identifier: Apache-2.0
#include "core/unknown_settings.h"

#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <numeric>
#include <optional>
#include <utility>

#include "core/log.h"
#include "core/settings.h"
#include "core/words.h"

namespace bps {
namespace {

struct Removed {
  std::string_view name;
  std::string_view why;
};
constexpr Removed kRemoved[] = {
    {"BPS_HEARTBEAT_INTERVAL", "members send heartbeats often enough for BPS_HEARTBEAT_TIMEOUT"},
};

// Describes variables of BytePS and ps-lite that this library ignores on purpose. `warning` is true where a user who
// sets one expects something that does not happen.
struct Ignored {
  std::string_view names;
  std::string_view why;
  bool warning = false;
};
constexpr Ignored kIgnored[] = {
    {"BYTEPS_ENABLE_MIXED_MODE", "set BPS_KEY_HASH_FN=mixed instead", true},
    {"DMLC_ENABLE_UCX", "there is no UCX transport; set BPS_TRANSPORT=rdma for RDMA", true},
    {"BYTEPS_UCX_ERRH_ENABLE BYTEPS_UCX_RECONNECT_TMO BYTEPS_UCX_SHORT_THRESH BYTEPS_UCX_FORCE_REQ_ORDER "
     "BYTEPS_UCX_QUEUE_SENDS BYTEPS_UCX_CONNECT_LOG",
     "there is no UCX transport"},
    {"BYTEPS_RDMA_START_DEPTH BYTEPS_RDMA_RX_DEPTH BYTEPS_RDMA_MAX_CONCURR_WR BYTEPS_ADDRESS_POOL_SIZE "
     "BYTEPS_RDMA_CTRL_RX_DEPTH BYTEPS_RDMA_USE_SRQ BYTEPS_RDMA_SRQ_DEPTH BYTEPS_ENCODING_SCHEME_VERSION",
     "RDMA queues are sized by the number of peers and by BPS_SERVER_WINDOW"},
    {"BYTEPS_RDMA_MR_DEBUG BYTEPS_RDMA_REG_BACKOFF BYTEPS_RDMA_MR_CACHE_LIMIT_MB BYTEPS_RDMA_HOST_MR_CACHE_LIMIT_MB "
     "BYTEPS_RDMA_EXACT_LOCAL_CACHE_MB BYTEPS_RDMA_NO_EXPAND BYTEPS_RDMA_REG_WINDOW_MB",
     "memory is registered once per allocation in a bounded cache"},
    {"DMLC_USE_GDR BYTEPS_GDR_LEN_PROBE BYTEPS_GDR_FALLBACK BYTEPS_GDR_FALLBACK_THRESHOLD_MB BYTEPS_SYNC_CUDA_COPY",
     "tensors on a GPU are copied through pinned memory"},
    {"BYTEPS_ENABLE_IPC BYTEPS_IPC_COPY_NUM_THREADS BYTEPS_IPC_ENABLE_ASYNC_COPY DMLC_LOCAL BYTEPS_SOCKET_PATH",
     "peers on one host use shared memory by themselves (BPS_TRANSPORT)"},
    {"BYTEPS_FORCE_DISTRIBUTED", "servers sum the gradients of one machine as well"},
    {"BYTEPS_ENABLE_FUSED_PUSH_PULL", "push and pull are always one request"},
    {"BYTEPS_PCIE_SWITCH_SIZE BYTEPS_NCCL_GROUP_SIZE BYTEPS_NCCL_NUM_RINGS BYTEPS_REDUCE_ROOTS",
     "NCCL is not used inside a machine"},
    {"BYTEPS_OMP_THREAD_PER_GPU BYTEPS_THREADPOOL_SIZE DMLC_LOCKLESS_QUEUE DMLC_POLLING_IN_NANOSECOND "
     "BYTEPS_ZMQ_MAX_SOCKET BYTEPS_ZMQ_NTHREADS BYTEPS_SERVER_GLOBAL_HANDLER_LOCK",
     "each loop is one thread; BPS_PUSH_THREAD, BPS_SERVER_ENGINE_THREAD and BPS_SPIN_US set their number and "
     "spinning"},
    {"BYTEPS_SERVER_ENGINE_BLOCKING BYTEPS_SERVER_ENABLE_SCHEDULE BYTEPS_SERVER_MXNET_PATH",
     "server loops sum a partition as soon as it arrives, in the order of ranks"},
    {"BYTEPS_NUMA_ON BYTEPS_NUMA_DEFAULT_QUOTA BYTEPS_NUMA_ROOT_QUOTA BYTEPS_CPU_BLACKLIST BYTEPS_VISIBLE_CPU_CORES "
     "BYTEPS_MULTITHREADED_CPU",
     "threads are not pinned; use numactl or taskset"},
    {"DMLC_PORT DMLC_NUM_PORTS DMLC_RANK DMLC_GROUP_SIZE DMLC_NUM_CPU_DEV DMLC_NUM_GPU_DEV DMLC_USE_KUBERNETES "
     "BYTEPS_ORDERED_HOSTS",
     "members find ports and ranks through the scheduler"},
    {"BYTEPS_TELEMETRY_ON BYTEPS_DEBUG_SAMPLE_TENSOR BYTEPS_LOG_HIDE_TIME BYTEPS_PRINT_RDMA_LOG BYTEPS_SERVER_DEBUG "
     "BYTEPS_SERVER_DEBUG_KEY DMLC_RECORD_EVENT BYTEPS_ENABLE_GDB",
     "counters are always on, see metrics(); BPS_LOG_LEVEL sets how much is logged"},
    {"BYTEPS_WITH_UCX BYTEPS_SERVER_ONLY BYTEPS_FORCE_NO_CUDA BYTEPS_USE_MPI", "this is an option of BytePS's build"},
};

// The launchers, benchmarks, tests and builds of this project use variables with these prefixes.
constexpr std::string_view kOwnPrefixes[] = {"BPS_TEST_", "BPS_BENCH_", "BPS_COMPARE_", "BPS_SUITE",
                                             "BPS_VM",    "BPS_FUZZ",   "BPS_SANITIZE", "BPS_FORWARD"};

bool is_known(std::string_view variable) {
  const auto table = settings_table();
  return std::ranges::any_of(
      table, [&](const Setting& setting) { return setting.name == variable || has_word(setting.aliases, variable); });
}

// Counts the insertions, deletions and replacements that turn one text into the other (Levenshtein).
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i + 1);
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = std::exchange(row[j + 1], std::min({replaced, row[j] + 1, row[j + 1] + 1}));
    }
  }
  return row.back();
}

std::optional<SettingNote> check(std::string_view variable) {
  const bool ours = variable.starts_with("BPS_");
  if (!ours && !variable.starts_with("BYTEPS_") && !variable.starts_with("DMLC_")) return std::nullopt;
  if (is_known(variable)) return std::nullopt;
  const std::string name(variable);
  if (const std::string_view why = removed_setting(variable); !why.empty()) {
    return SettingNote{name, name + " was removed and has no effect: " + std::string(why), true};
  }
  for (const Ignored& ignored : kIgnored) {
    if (!has_word(ignored.names, variable)) continue;
    return SettingNote{name, name + " has no effect here: " + std::string(ignored.why), ignored.warning};
  }
  const auto starts = [&](std::string_view prefix) { return variable.starts_with(prefix); };
  if (std::ranges::any_of(kOwnPrefixes, starts)) return std::nullopt;
  const std::string nearest = nearest_setting(variable);
  return SettingNote{
      name, name + " is not a setting and has no effect" + (nearest.empty() ? "" : "; did you mean " + nearest + "?"),
      true};
}

}  // namespace

std::string_view removed_setting(std::string_view name) {
  const auto found = std::ranges::find(kRemoved, name, &Removed::name);
  return found == std::end(kRemoved) ? std::string_view() : found->why;
}

std::string nearest_setting(std::string_view name) {
  std::string_view nearest;
  std::size_t least = name.size() / 3 + 1;  // two names that differ in more than a third are not alike
  for (const Setting& setting : settings_table()) {
    for_each_word(std::string(setting.name) + " " + std::string(setting.aliases), ' ', [&](std::string_view candidate) {
      const std::size_t distance = edit_distance(name, candidate);
      if (distance >= least) return;
      least = distance;
      // The words above are those of a copy: what is kept must be a part of the table.
      const std::size_t alias = setting.aliases.find(candidate);
      nearest = candidate == setting.name ? setting.name : setting.aliases.substr(alias, candidate.size());
    });
  }
  return std::string(nearest);
}

std::vector<SettingNote> check_variables(std::span<const std::string> variables) {
  std::vector<SettingNote> notes;
  for (const std::string& variable : variables) {
    const std::size_t equals = variable.find('=');
    if (equals == std::string::npos || equals + 1 == variable.size()) continue;
    if (auto note = check(std::string_view(variable).substr(0, equals))) notes.push_back(std::move(*note));
  }
  std::ranges::sort(notes, {}, &SettingNote::variable);
  return notes;
}

std::vector<SettingNote> check_environment() {
  std::vector<std::string> variables;
  for (char** variable = environ; variable != nullptr && *variable != nullptr; ++variable) {
    variables.emplace_back(*variable);
  }
  return check_variables(variables);
}

void log_unknown_settings() {
  static std::once_flag once;
  std::call_once(once, [] {
    for (const SettingNote& note : check_environment()) {
      log_line(note.warning ? LogLevel::kWarning : LogLevel::kInfo, note.text);
    }
  });
}

}  // namespace bps
