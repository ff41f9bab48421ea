// SPDX-License-Identifier: Apache-2.0
#include "pool/job_settings.h"

#include <unistd.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string_view>

#include "core/error.h"
#include "core/words.h"
#include "node/startup.h"

namespace bps::pool {
namespace {

constexpr std::string_view kOfJob[] = {
    "BPS_NUM_WORKERS",
    "BPS_NUM_SERVERS",
    "BPS_LOCAL_SIZE",
    "BPS_ROOT_URI",
    "BPS_ROOT_PORT",
    "BPS_JOB_ID",
    "BPS_MIN_WORKERS",
    "BPS_SERVER_FAILOVER",
    "BPS_PLACEMENT",
    "BPS_PLACEMENT_SECONDS",
    "BPS_TRANSPORT",
    "BPS_PARTITION_BYTES",
    "BPS_KEY_HASH_FN",
    "BPS_MIN_PARTITION_BYTES",
    "BPS_BUILT_IN_HASH_COEF",
    "BPS_MIXED_MODE_BOUND",
    "BPS_ASYNC",
    "BPS_STALENESS",
    "BPS_SERVER_WINDOW",
    "BPS_TIMEOUT",
    "BPS_JOIN_TIMEOUT",
    "BPS_SHUTDOWN_TIMEOUT",
    "BPS_HEARTBEAT_TIMEOUT",
    "BPS_SCHEDULER_PATIENCE",
    "BPS_RESUME_TIMEOUT",
    "BPS_TCP_STREAMS",
    "BPS_RDMA_QPS",
};
// These belong neither to the job nor to the pool's environment: the pool says them, or nobody does.
constexpr std::string_view kOfNobody[] = {
    "BPS_ROLE",          "BPS_WORKER_ID",       "BPS_LOCAL_RANK", "BPS_RANK",         "BPS_WORLD_SIZE",
    "BPS_SECRET",        "BPS_SECRET_FILE",     "BPS_INSECURE",   "BPS_METRICS_PORT", "BPS_SERVER_ENGINE_THREAD",
    "BPS_SERVER_MEMORY", "BPS_SCHEDULER_STATE",
};
// A server may wait so long for others. One that nobody needs any more is in the way meanwhile.
constexpr double kMostPatience_s = 600;
constexpr std::string_view kPatience[] = {"BPS_JOIN_TIMEOUT", "BPS_HEARTBEAT_TIMEOUT", "BPS_SCHEDULER_PATIENCE"};

bool is_one_of(auto& names, std::string_view name) {
  return std::ranges::find(names, name) != std::end(names);
}

// Returns true for a variable of this process alone, and not for a server that it starts.
bool is_kept_back(std::string_view variable) {
  if (variable.starts_with("BPS_POOL")) return true;
  for (const Setting& setting : settings_table()) {
    if (!is_one_of(kOfJob, setting.name) && !is_one_of(kOfNobody, setting.name)) continue;
    if (variable == setting.name || has_word(setting.aliases, variable)) return true;
  }
  return false;
}

}  // namespace

NamedValues settings_of_job(const SettingValues& values) {
  NamedValues found;
  for (const std::string_view name : kOfJob) {
    const SettingValues::Value& value = values.value(name);
    if (value.source == "default") continue;
    if (value.text.size() > kMostText) {
      throw Error(ErrorCode::kInvalidArgument,
                  value.source + " has more than " + std::to_string(kMostText) + " characters", "shorten it");
    }
    found.push_back({std::string(name), value.text});
  }
  return found;
}

void check_settings(const NamedValues& settings) {
  std::map<std::string, std::string> given;
  for (const NamedValue& each : settings) {
    if (!is_one_of(kOfJob, each.name)) {
      throw Error(ErrorCode::kInvalidArgument, each.name + " is not for a job of a pool to set",
                  "its operator sets it for the pool");
    }
    // The log of the pool shows some of them.
    if (std::ranges::any_of(each.value, [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; })) {
      throw Error(ErrorCode::kInvalidArgument, each.name + " has characters that are not for reading",
                  "leave them out");
    }
    given[each.name] = each.value;
  }
  const SettingValues values([&](const std::string& variable) -> std::optional<std::string> {
    const auto found = given.find(variable);
    return found == given.end() ? std::nullopt : std::optional(found->second);
  });
  (void)node::startup_from(values.parse().job);
  for (const std::string_view name : kPatience) {
    const std::string& text = values.value(name).text;
    double seconds = 0;
    if (read_value({.kind = Range::Kind::kSeconds}, text, seconds) && seconds > kMostPatience_s) {
      throw Error(ErrorCode::kInvalidArgument,
                  std::string(name) + "=" + text + " is more than the 600 seconds that a pool waits for a job",
                  "set it lower");
    }
  }
}

std::vector<std::string> environment_of_server(const NamedValues& settings) {
  std::vector<std::string> variables;
  for (char** each = environ; *each != nullptr; ++each) {
    const std::string_view variable(*each);
    if (!is_kept_back(variable.substr(0, variable.find('=')))) variables.emplace_back(variable);
  }
  for (const NamedValue& each : settings) {
    variables.push_back(each.name);
    variables.back().append("=").append(each.value);
  }
  return variables;
}

}  // namespace bps::pool
