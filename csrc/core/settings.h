// SPDX-License-Identifier: Apache-2.0
// Holds the settings of the library in a typed struct, filled once from one declarative table (settings_table.cc).
//
// SettingValues collects the text of every setting and where the text comes from: an argument of init(), a BPS_*
// variable, an alias that BytePS, torchrun or NCCL users know, or the default. parse() turns all texts into a Settings.
// It throws kInvalidArgument for the first one outside its range, naming variable, value and range. Code that works
// with settings takes a Settings, or a part of it, and never looks up a name.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "core/log.h"
#include "core/port_range.h"

namespace bps {

struct JobSettings {
  std::string role;
  std::optional<std::uint32_t> machines;  // how many hosts have workers
  std::optional<std::uint32_t> servers;
  std::optional<std::uint32_t> worker_id;
  std::optional<std::uint32_t> local_rank;
  std::optional<std::uint32_t> local_size;
  std::optional<std::uint32_t> rank;
  std::optional<std::uint32_t> world_size;
  std::string root_uri;
  std::optional<std::uint16_t> root_port;
  std::string id;
  std::string secret;
  std::string secret_file;
  bool insecure = false;
  std::uint32_t min_workers = 0;
  std::string placement;  // see van::parse_placement()
  std::uint32_t placement_seconds = 0;
  std::string server_failover;  // auto, 0, 1
  std::string scheduler_state;
  std::string rsh;
};

struct TransportSettings {
  std::string host_id;
  std::optional<double> link_gbps;  // the speed of this host's link
  std::string allowed;              // see van::allowed_transports()
  std::string interface;
  std::string node_host;
  PortRange ports;
  std::uint32_t tcp_streams = 0;
  std::string tcp_congestion;
  bool shm_cma = false;
  std::string shm_fence;
  std::optional<std::uint32_t> spin_us;  // nothing: it follows from the number of cores
  std::string fault;
};

struct RdmaSettings {
  std::string hca;
  std::string near_gpu;  // see node/near_gpu.h
  std::optional<unsigned> gid_index;
  std::optional<unsigned> traffic_class;
  std::optional<unsigned> service_level;
  std::optional<unsigned> pkey_index;
  unsigned timeout = 0;
  unsigned retry_count = 0;
  unsigned data_queue_pairs = 0;
  std::string callers_memory;  // watched, staged, trusted
  std::string verbs_library;
};

struct WorkerSettings {
  std::uint64_t partition_bytes = 0;
  bool partition_given = false;  // the user gave it: otherwise slow links get smaller ones
  std::uint64_t min_partition_bytes = 0;
  std::uint64_t scheduling_credit = 0;
  std::uint32_t loops = 0;  // 0: see BPS_PUSH_THREAD
  std::string key_hash;     // see tensor::parse_key_hash()
  bool host_sum = false;
  std::string compression;  // see compress/compression.h
  std::uint64_t min_compress_bytes = 0;
  bool exact = false;
  bool async = false;
  std::int64_t staleness = -1;
  std::uint64_t built_in_coefficient = 0;
  std::uint64_t mixed_bound = 0;
  std::uint64_t staging_bytes = 0;
  std::uint64_t gpu_chunk_bytes = 0;
  std::uint32_t gpu_chunks = 0;
  bool gpu_host_sum = false;  // this and the next two are read by the Python face
  bool device_route = false;
  std::string cuda_library;
  bool gpudirect = false;
};

struct ServerSettings {
  std::uint32_t loops = 0;  // 0: see BPS_SERVER_ENGINE_THREAD
  std::uint32_t window = 0;
  std::uint64_t slot_memory = 0;
  std::optional<double> sum_gbps;
};

// These are about pools of servers that jobs share; see csrc/pool.
struct PoolSettings {
  std::string names{};  // the pools that a job asks
  std::string key_file{};
  std::string host{};  // this and the rest are a pool's own
  std::uint16_t port = 0;
  std::uint32_t cores = 0;   // 0: all that the process may use
  std::uint64_t memory = 0;  // 0: three quarters of what there is
  std::uint32_t jobs = 0;
  std::uint32_t user_jobs = 0;  // 0: no other limit than that of all jobs
  std::uint32_t job_cores = 0;  // 0: no other limit than that of the pool; the same for the next
  std::uint64_t job_memory = 0;
};

struct Deadlines {  // seconds
  double operation = 0;
  double join = 0;
  double shutdown = 0;
  double heartbeat = 0;
  std::uint32_t scheduler = 0;  // for another scheduler, in the place of a lost one
  std::uint32_t resume = 0;     // for workers that resume a suspended job
};

struct MetricsSettings {
  std::optional<std::uint16_t> port;  // nothing: not served
  std::string host;
};

struct TraceSettings {
  std::string folder;
  bool as_byteps = false;  // BytePS's variables say whether, and where
  std::string byteps_folder;
  std::optional<std::uint32_t> first_round;
  std::optional<std::uint32_t> last_round;

  bool is_on() const { return !folder.empty() || as_byteps; }
};

struct Settings {
  JobSettings job;
  TransportSettings transport;
  RdmaSettings rdma;
  WorkerSettings worker;
  ServerSettings server;
  PoolSettings pool;
  Deadlines deadlines;
  MetricsSettings metrics;
  TraceSettings trace;
  LogLevel log_level = LogLevel::kWarning;
  std::string dump_dir;
};

// Describes the values that a setting may have.
struct Range {
  enum class Kind : std::uint8_t { kText, kWords, kFlag, kWhole, kNumber, kSeconds, kPorts };
  Kind kind = Kind::kText;
  std::int64_t lowest = 0;
  std::int64_t highest = 0;
  std::string_view words{};       // the value is one of these, which are separated by spaces
  std::string_view list_words{};  // or it is several of these, separated by commas

  std::string describe() const;  // "a whole number from 1 to 64"
};

// Describes one row of the table.
struct Setting {
  std::string_view name;      // BPS_SOMETHING
  std::string_view aliases;   // separated by spaces, the first that is set counts
  std::string_view fallback;  // the default; empty: unset
  Range range;
  bool (*store)(Settings&, const Range&, std::string_view text);  // false: the text is outside the range
  std::string_view help;
  bool secret = false;  // shown as "set" or "unset"
};

std::span<const Setting> settings_table();
// Returns null when there is no setting of that name.
const Setting* find_setting(std::string_view name);

class SettingValues {
 public:
  using Lookup = std::function<std::optional<std::string>(const std::string& variable)>;

  SettingValues();                        // takes them from the environment of this process
  explicit SettingValues(Lookup lookup);  // takes them from anything else, for tests

  // Throws kInvalidArgument for a name that is not, or no longer, a setting.
  void set(const std::string& name, const std::string& value, const std::string& source);
  Settings parse() const;

  struct Value {
    std::string text;
    std::string source;  // "default", "argument", or the variable's name
  };
  const Value& value(std::string_view name) const;
  // Returns one value, checked against its range, for the settings page and for Python.
  std::int64_t integer(std::string_view name) const;
  double seconds(std::string_view name) const;

 private:
  void store(const Setting& setting, Settings& into) const;

  std::map<std::string, Value, std::less<>> values_;
};

// These read values of each Range::Kind for the table. They return false for a text outside the range.
bool read_whole(const Range& range, std::string_view text, std::int64_t& into);
bool read_value(const Range& range, std::string_view text, std::string& into);
bool read_value(const Range& range, std::string_view text, bool& into);
bool read_value(const Range& range, std::string_view text, double& into);
bool read_value(const Range& range, std::string_view text, LogLevel& into);
bool read_value(const Range& range, std::string_view text, PortRange& into);

}  // namespace bps
