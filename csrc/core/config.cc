#include "core/config.h"

#include <charconv>
#include <cstdlib>

#include "core/error.h"

namespace bps {

std::vector<Setting> Config::table() {
  return {
      // The job
      {"BPS_ROLE", "DMLC_ROLE", "", "worker, server, scheduler or joint; empty: joint, started by init() itself"},
      {"BPS_NUM_WORKERS", "DMLC_NUM_WORKER", "", "machines with workers (BytePS's meaning: processes / local size)"},
      {"BPS_NUM_SERVERS", "DMLC_NUM_SERVER", "", "server processes; empty: one in every worker"},
      {"BPS_WORKER_ID", "DMLC_WORKER_ID", "", "which of the worker machines this is, from 0"},
      {"BPS_LOCAL_RANK", "BYTEPS_LOCAL_RANK LOCAL_RANK", "", "rank of this process on its machine"},
      {"BPS_LOCAL_SIZE", "BYTEPS_LOCAL_SIZE LOCAL_WORLD_SIZE", "", "worker processes on this machine"},
      {"BPS_RANK", "BYTEPS_GLOBAL_RANK RANK", "", "rank of this worker process, from 0"},
      {"BPS_WORLD_SIZE", "WORLD_SIZE", "", "worker processes of the job"},
      {"BPS_ROOT_URI", "DMLC_PS_ROOT_URI MASTER_ADDR", "127.0.0.1", "host of the scheduler"},
      {"BPS_ROOT_PORT", "DMLC_PS_ROOT_PORT", "", "port of the scheduler; empty: one derived from the job"},
      {"BPS_JOB_ID", "TORCHELASTIC_RUN_ID", "", "name of the job; members of another job are refused"},
      {"BPS_SECRET", "", "", "shared secret of the job; empty: derived from the job's start-up variables"},
      // Transport
      {"BPS_TRANSPORT", "DMLC_ENABLE_RDMA", "auto",
       "shm, tcp, rdma or several of them, best first; auto: shm on one host, else rdma, else tcp"},
      {"BPS_INTERFACE", "DMLC_INTERFACE NCCL_SOCKET_IFNAME", "", "network interface to use; empty: the route's"},
      {"BPS_NODE_HOST", "DMLC_NODE_HOST", "", "address that peers use to reach this process"},
      {"BPS_TCP_STREAMS", "", "2", "data connections per peer"},
      {"BPS_TCP_CONGESTION", "", "cubic", "congestion control per socket; empty: the system's (BBR paces loopback)"},
      {"BPS_SHM_CMA", "", "1", "let same-host servers touch plain memory by cross-memory copies; 0: stage it"},
      {"BPS_RDMA_HCA", "NCCL_IB_HCA", "",
       "RDMA devices to use, as in mlx5_0:1,mlx5_1; '=' in front: exact names, '^': all but these; empty: the best "
       "one"},
      {"BPS_RDMA_GID_INDEX", "NCCL_IB_GID_INDEX", "-1", "entry of the GID table; -1: the best one, see `bps doctor`"},
      {"BPS_RDMA_TC", "NCCL_IB_TC", "-1", "traffic class of RoCE packets; -1: the system's"},
      {"BPS_RDMA_SL", "NCCL_IB_SL", "-1", "service level; -1: the system's"},
      {"BPS_RDMA_PKEY", "NCCL_IB_PKEY", "-1", "index of the partition key; -1: the system's"},
      {"BPS_RDMA_TIMEOUT", "NCCL_IB_TIMEOUT", "18",
       "wait for an acknowledgement: 4.096 us times 2 to the power of this"},
      {"BPS_RDMA_RETRY_CNT", "NCCL_IB_RETRY_CNT", "7", "tries again after as many such waits, before the peer is lost"},
      {"BPS_RDMA_QPS", "NCCL_IB_QPS_PER_CONNECTION", "2", "data queue pairs per pair of loops"},
      // Worker
      {"BPS_PARTITION_BYTES", "BYTEPS_PARTITION_BYTES", "524288", "largest piece of a tensor, bytes"},
      {"BPS_MIN_PARTITION_BYTES", "", "65536", "middle-sized tensors are cut no finer than this, bytes"},
      {"BPS_SCHEDULING_CREDIT", "BYTEPS_SCHEDULING_CREDIT", "0",
       "bytes in flight per push loop, shared by the servers, that more urgent tensors cannot overtake; 0: unlimited; "
       "below "
       "1000: partitions"},
      {"BPS_PUSH_THREAD", "BYTEPS_PUSH_THREAD", "1", "push loops, and as many pull loops"},
      {"BPS_KEY_HASH_FN", "BYTEPS_KEY_HASH_FN", "raw", "raw, djb2, naive, built_in, sdbm, mixed or balanced"},
      {"BPS_BUILT_IN_HASH_COEF", "BYTEPS_BUILT_IN_HASH_COEF", "1", "coefficient of built_in"},
      {"BPS_MIXED_MODE_BOUND", "BYTEPS_MIXED_MODE_BOUND", "101", "bound of mixed"},
      {"BPS_STAGING_BYTES", "", "67108864", "memory per push loop for tensors a server cannot reach itself, bytes"},
      {"BPS_GPU_CHUNK_BYTES", "", "4194304", "tensors on a GPU go through pinned memory in chunks of this size, bytes"},
      {"BPS_GPU_CHUNKS", "", "4", "such chunks in memory, per GPU and group"},
      // Server
      {"BPS_SERVER_ENGINE_THREAD", "BYTEPS_SERVER_ENGINE_THREAD", "0", "server loops; 0: one per core, at most 4"},
      {"BPS_SERVER_WINDOW", "", "4", "partitions a worker may have on the way to one server loop (landing slots)"},
      {"BPS_SERVER_MEMORY", "", "4294967296",
       "bytes of landing slots on one server; many workers get smaller windows, one slot at least; 0: no limit"},
      // Deadlines
      {"BPS_TIMEOUT", "", "300", "seconds until an operation that does not complete fails"},
      {"BPS_JOIN_TIMEOUT", "", "60", "seconds to wait for all members at start-up"},
      {"BPS_SHUTDOWN_TIMEOUT", "", "60", "seconds to wait for the other workers at shutdown"},
      {"BPS_HEARTBEAT_INTERVAL", "PS_HEARTBEAT_INTERVAL", "0.5", "seconds between signs of life"},
      {"BPS_HEARTBEAT_TIMEOUT", "PS_HEARTBEAT_TIMEOUT", "1.5", "seconds of silence until a member counts as lost"},
      // Seeing
      {"BPS_LOG_LEVEL", "BYTEPS_LOG_LEVEL", "WARNING", "ERROR, WARNING, INFO or DEBUG"},
      {"BPS_SPIN_US", "", "-1",
       "longest spin before a loop or a waiting caller sleeps, microseconds; -1: 0 where cores are scarce, else 20 and "
       "50"},
      {"BPS_FAULT", "", "", "for tests: make the transports misbehave, e.g. refuse=0.1,partial=0.3,hold=0.5,seed=7"},
  };
}

Config::Config()
    : Config([](const std::string& variable) -> std::optional<std::string> {
        const char* value = std::getenv(variable.c_str());
        return value == nullptr ? std::nullopt : std::optional<std::string>(value);
      }) {}

Config::Config(Lookup lookup) {
  for (const Setting& setting : table()) {
    Value value{std::string(setting.fallback), "default"};
    std::string names = std::string(setting.name) + " " + std::string(setting.aliases);
    for (std::size_t begin = 0; begin < names.size();) {
      const std::size_t end = std::min(names.find(' ', begin), names.size());
      const std::string variable = names.substr(begin, end - begin);
      begin = end + 1;
      if (variable.empty()) continue;
      // An empty variable is an unset one: launch scripts often export names they have no value for.
      if (const auto found = lookup(variable); found && !found->empty()) {
        value = {*found, variable};
        break;
      }
    }
    values_[std::string(setting.name)] = value;
  }
}

void Config::set(const std::string& name, const std::string& value, const std::string& source) {
  const auto found = values_.find(name);
  if (found == values_.end()) {
    throw Error(ErrorCode::kInvalidArgument, "there is no setting " + name, "`bps config` lists the settings");
  }
  found->second = {value, source};
}

const Config::Value& Config::value(std::string_view name) const {
  const auto found = values_.find(name);
  if (found == values_.end()) {
    throw Error(ErrorCode::kInternal, "there is no setting " + std::string(name), "report this as a bug");
  }
  return found->second;
}

std::string Config::text(std::string_view name) const {
  return value(name).text;
}

namespace {

[[noreturn]] void reject(std::string_view name, const Config::Value& value, const std::string& wanted) {
  const std::string where = value.source == "default" || value.source == "argument" ? std::string(name) : value.source;
  throw Error(ErrorCode::kInvalidArgument, where + "='" + value.text + "' is not " + wanted,
              "set " + where + " to " + wanted + ", or unset it");
}

}  // namespace

std::int64_t Config::integer(std::string_view name, std::int64_t lowest, std::int64_t highest) const {
  const Value& found = value(name);
  std::int64_t number = 0;
  const char* end = found.text.data() + found.text.size();
  const auto [stop, error] = std::from_chars(found.text.data(), end, number);
  if (error != std::errc() || stop != end || number < lowest || number > highest) {
    reject(name, found, "a whole number from " + std::to_string(lowest) + " to " + std::to_string(highest));
  }
  return number;
}

double Config::seconds(std::string_view name) const {
  const Value& found = value(name);
  char* stop = nullptr;
  const double number = std::strtod(found.text.c_str(), &stop);
  if (found.text.empty() || *stop != '\0' || !(number > 0) || number > 1e9) reject(name, found, "seconds above 0");
  return number;
}

bool Config::flag(std::string_view name) const {
  const Value& found = value(name);
  for (const char* yes : {"1", "true", "yes", "on"}) {
    if (found.text == yes) return true;
  }
  for (const char* no : {"0", "false", "no", "off", ""}) {
    if (found.text == no) return false;
  }
  reject(name, found, "1 or 0");
}

}  // namespace bps
