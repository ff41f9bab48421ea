// SPDX-License-Identifier: Apache-2.0
// Lists all settings. docs/settings.md is generated from this table (`bps config --markdown`).
#include "core/settings.h"

namespace bps {
namespace {

template <typename T>
bool read_value(const Range& range, std::string_view text, T& into) {
  if constexpr (requires { into.reset(); }) {  // it is optional: an empty text, or a negative number, leaves it unset
    into.reset();
    if (text.empty()) return true;
    using Number = std::conditional_t<std::is_floating_point_v<typename T::value_type>, double, std::int64_t>;
    Number number = 0;
    if (!read_value(range, text, number)) return false;
    if (number >= 0) into = static_cast<typename T::value_type>(number);
    return true;
  } else if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
    std::int64_t number = 0;
    if (!read_whole(range, text, number)) return false;
    into = static_cast<T>(number);
    return true;
  } else {
    return bps::read_value(range, text, into);
  }
}

// Reads the value of a row into its member.
template <auto Part, auto Member>
bool into(Settings& settings, const Range& range, std::string_view text) {
  return read_value(range, text, settings.*Part.*Member);
}
bool into_log_level(Settings& settings, const Range& range, std::string_view text) {
  return read_value(range, text, settings.log_level);
}

bool into_dump_dir(Settings& settings, const Range& range, std::string_view text) {
  return read_value(range, text, settings.dump_dir);
}

template <auto Member>
constexpr auto job = into<&Settings::job, Member>;
template <auto Member>
constexpr auto transport = into<&Settings::transport, Member>;
template <auto Member>
constexpr auto rdma = into<&Settings::rdma, Member>;
template <auto Member>
constexpr auto worker = into<&Settings::worker, Member>;
template <auto Member>
constexpr auto server = into<&Settings::server, Member>;
template <auto Member>
constexpr auto pools = into<&Settings::pool, Member>;
template <auto Member>
constexpr auto trace = into<&Settings::trace, Member>;
template <auto Member>
constexpr auto metrics = into<&Settings::metrics, Member>;
template <auto Member>
constexpr auto deadline = into<&Settings::deadlines, Member>;

constexpr Range kText{};
constexpr Range kFlag{.kind = Range::Kind::kFlag};
constexpr Range kSeconds{.kind = Range::Kind::kSeconds};
constexpr Range kPorts{.kind = Range::Kind::kPorts};
constexpr std::int64_t kMany = 65535;
constexpr std::int64_t kGiB = 1 << 30;

constexpr Range whole(std::int64_t lowest, std::int64_t highest = INT64_MAX) {
  return {.kind = Range::Kind::kWhole, .lowest = lowest, .highest = highest};
}
constexpr Range words(std::string_view words, std::string_view list_words = {}) {
  return {.kind = Range::Kind::kWords, .words = words, .list_words = list_words};
}

constexpr Setting kTable[] = {
    // The job
    {"BPS_ROLE", "DMLC_ROLE", "", words("worker server scheduler joint"), job<&JobSettings::role>,
     "worker, server, scheduler or joint; empty: joint, as init() starts it"},
    {"BPS_NUM_WORKERS", "DMLC_NUM_WORKER", "", whole(1, kMany), job<&JobSettings::machines>,
     "machines with workers (BytePS's meaning: processes / local size)"},
    {"BPS_NUM_SERVERS", "DMLC_NUM_SERVER", "", whole(1, kMany), job<&JobSettings::servers>,
     "dedicated server processes; empty: every worker process is a server too"},
    {"BPS_WORKER_ID", "DMLC_WORKER_ID", "", whole(0, kMany), job<&JobSettings::worker_id>,
     "which of the worker machines this is, from 0"},
    {"BPS_LOCAL_RANK", "BYTEPS_LOCAL_RANK LOCAL_RANK", "", whole(0, kMany), job<&JobSettings::local_rank>,
     "rank of this process on its machine"},
    {"BPS_LOCAL_SIZE", "BYTEPS_LOCAL_SIZE LOCAL_WORLD_SIZE", "", whole(1, 4096), job<&JobSettings::local_size>,
     "worker processes on this machine"},
    {"BPS_RANK", "BYTEPS_GLOBAL_RANK RANK", "", whole(0, kMany), job<&JobSettings::rank>,
     "rank of this worker process, from 0"},
    {"BPS_WORLD_SIZE", "WORLD_SIZE", "", whole(1, kMany), job<&JobSettings::world_size>, "worker processes of the job"},
    {"BPS_ROOT_URI", "DMLC_PS_ROOT_URI MASTER_ADDR", "127.0.0.1", kText, job<&JobSettings::root_uri>,
     "host of the scheduler"},
    {"BPS_ROOT_PORT", "DMLC_PS_ROOT_PORT", "", whole(1, 65535), job<&JobSettings::root_port>,
     "port of the scheduler; empty: a port derived from the job"},
    {"BPS_JOB_ID", "", "", kText, job<&JobSettings::id>, "name of the job; processes of another job are rejected"},
    {"BPS_SECRET", "", "", kText, job<&JobSettings::secret>,
     "shared secret of the job, random text; empty: see BPS_SECRET_FILE", true},
    {"BPS_SECRET_FILE", "", "", kText, job<&JobSettings::secret_file>,
     "file with the secret, which only this user can read; empty: on one host a file that is made at first use, and "
     "no job on several hosts"},
    {"BPS_RSH", "", "ssh", kText, job<&JobSettings::rsh>,
     "program, and its options, by which `bps run -H` starts processes on other hosts"},
    {"BPS_INSECURE", "", "0", kFlag, job<&JobSettings::insecure>,
     "1: a job without BPS_SECRET and BPS_SECRET_FILE has no secret; everybody who reaches its ports can join it"},
    {"BPS_MIN_WORKERS", "", "0", whole(0, kMany), job<&JobSettings::min_workers>,
     "the job goes on after a loss while this many workers are left; 0: the loss of a member ends it"},
    {"BPS_SERVER_FAILOVER", "", "auto", words("0 1 auto"), job<&JobSettings::server_failover>,
     "with BPS_MIN_WORKERS, the loss of a dedicated server aborts no operation. 0: off; 1: on; auto: on, except in "
     "asynchronous training"},
    {"BPS_PLACEMENT", "", "auto", words("auto mixed dedicated embedded"), job<&JobSettings::placement>,
     "which servers sum. auto: the dedicated ones, and those inside the workers as far as that keeps all links full; "
     "mixed: the same, as if all links were equal; dedicated or embedded: those servers alone"},
    {"BPS_PLACEMENT_SECONDS", "", "5", whole(0, kMany), job<&JobSettings::placement_seconds>,
     "least time in seconds between two changes of what each server sums, which follow links that become slow or "
     "fast; 0: no changes"},
    // Transports
    {"BPS_TRANSPORT", "DMLC_ENABLE_RDMA", "auto", words("auto 0 1 zmq ibverbs", "shm tcp rdma"),
     transport<&TransportSettings::allowed>,
     "shm, tcp, rdma or several of them, best first; auto: shm on one host, else rdma, else tcp"},
    {"BPS_INTERFACE", "DMLC_INTERFACE NCCL_SOCKET_IFNAME", "", kText, transport<&TransportSettings::interface>,
     "network interfaces to use, as in eth0,eth1: data goes over all of them, in proportion to their speeds. The "
     "beginning of a name means all that begin so; '=' in front: exact names; '^' in front: all others. Empty: the "
     "interface of the route to the scheduler"},
    {"BPS_NODE_HOST", "DMLC_NODE_HOST", "", kText, transport<&TransportSettings::node_host>,
     "address at which peers reach this process"},
    {"BPS_PORTS", "", "", kPorts, transport<&TransportSettings::ports>,
     "ports to listen on for other hosts, as in 30000-30100, for data and the scheduler; empty: any"},
    {"BPS_LINK_GBPS",
     "",
     "",
     {.kind = Range::Kind::kNumber},
     transport<&TransportSettings::link_gbps>,
     "Gbit/s that the links of this host carry in all; empty: the speeds of its interfaces"},
    {"BPS_HOST_ID", "", "", kText, transport<&TransportSettings::host_id>,
     "a text that tells hosts apart: give containers of one machine different ones, if they share no memory"},
    {"BPS_TCP_STREAMS", "", "2", whole(1, 64), transport<&TransportSettings::tcp_streams>,
     "TCP data connections for each pair of threads (loops) that exchange data"},
    {"BPS_TCP_CONGESTION", "", "cubic", kText, transport<&TransportSettings::tcp_congestion>,
     "congestion control of each TCP connection; empty: the system's (BBR paces loopback)"},
    {"BPS_SHM_CMA", "", "1", kFlag, transport<&TransportSettings::shm_cma>,
     "1: servers on the same host read and write ordinary memory by cross-memory copies; 0: workers copy it to "
     "shared memory"},
    {"BPS_SHM_FENCE", "", "kill", words("kill copy"), transport<&TransportSettings::shm_fence>,
     "how workers make sure that a lost process of their host does not write to their memory later. kill: they end "
     "it; copy: servers always work on copies"},
    {"BPS_RDMA_HCA", "NCCL_IB_HCA", "", kText, rdma<&RdmaSettings::hca>,
     "RDMA devices to use, as in mlx5_0:1,mlx5_1; '=' in front: exact names; '^' in front: all others; empty: all that "
     "are usable"},
    {"BPS_RDMA_NEAR_GPU", "", "", kText, rdma<&RdmaSettings::near_gpu>,
     "the GPU whose nearest RDMA devices this worker uses, unless BPS_RDMA_HCA lists some. auto: its own; a number, as "
     "CUDA counts; a PCI address; empty: all devices"},
    {"BPS_RDMA_GID_INDEX", "NCCL_IB_GID_INDEX", "-1", whole(-1, 65535), rdma<&RdmaSettings::gid_index>,
     "entry of the GID table; -1: the best one, see `bps doctor`"},
    {"BPS_RDMA_TC", "NCCL_IB_TC", "-1", whole(-1, 255), rdma<&RdmaSettings::traffic_class>,
     "traffic class of RoCE packets; -1: the system's"},
    {"BPS_RDMA_SL", "NCCL_IB_SL", "-1", whole(-1, 15), rdma<&RdmaSettings::service_level>,
     "service level; -1: the system's"},
    {"BPS_RDMA_PKEY", "NCCL_IB_PKEY", "-1", whole(-1, 65535), rdma<&RdmaSettings::pkey_index>,
     "index of the partition key; -1: the system's"},
    {"BPS_RDMA_TIMEOUT", "NCCL_IB_TIMEOUT", "16", whole(1, 31), rdma<&RdmaSettings::timeout>,
     "n, for a wait of 4.096 us times 2 to the power of n before packets are sent again; 16: 0.27 s"},
    {"BPS_RDMA_RETRY_CNT", "NCCL_IB_RETRY_CNT", "7", whole(0, 7), rdma<&RdmaSettings::retry_count>,
     "how often packets are sent again before the connection is lost; with both defaults a cable may be out for 2 s"},
    {"BPS_RDMA_QPS", "NCCL_IB_QPS_PER_CONNECTION", "2", whole(1, 16), rdma<&RdmaSettings::data_queue_pairs>,
     "data queue pairs for each pair of threads (loops) that exchange data"},
    {"BPS_RDMA_MEMORY", "", "watched", words("watched staged trusted"), rdma<&RdmaSettings::callers_memory>,
     "how the device uses memory that bps_rdma has not allocated. watched: directly where the kernel tells when it is "
     "given back, otherwise by copies; staged: by copies; trusted: directly, and a program that gives memory back gets "
     "wrong sums; see docs/rdma.md"},
    {"BPS_IBVERBS_LIB", "", "libibverbs.so.1", kText, rdma<&RdmaSettings::verbs_library>,
     "the library of verbs: a name, or a path; read at the first use of RDMA in a process"},
    // Workers
    {"BPS_PARTITION_BYTES", "BYTEPS_PARTITION_BYTES", "524288", whole(8, kGiB),
     worker<&WorkerSettings::partition_bytes>,
     "bytes of a partition, the largest piece of a tensor; unless it is set, init() measures the links between hosts, "
     "and slow links get smaller pieces (see docs/tuning.md)"},
    {"BPS_MIN_PARTITION_BYTES", "", "65536", whole(8, kGiB), worker<&WorkerSettings::min_partition_bytes>,
     "least bytes of a partition: small tensors are cut finer, so that all servers get a part, but not finer than "
     "this"},
    {"BPS_SCHEDULING_CREDIT", "BYTEPS_SCHEDULING_CREDIT", "0", whole(0), worker<&WorkerSettings::scheduling_credit>,
     "bytes that each worker thread has under way, which more urgent tensors cannot overtake; 0: unlimited; below "
     "1000: "
     "a number of partitions, as in BytePS"},
    {"BPS_PUSH_THREAD", "BYTEPS_PUSH_THREAD", "0", whole(0, 64), worker<&WorkerSettings::loops>,
     "threads of a worker that push and pull (worker loops); 0: two where data goes by TCP, unless the interfaces "
     "carry "
     "10 Gbit/s or less, else one"},
    {"BPS_KEY_HASH_FN", "BYTEPS_KEY_HASH_FN", "raw", words("raw djb2 naive built_in sdbm mixed balanced"),
     worker<&WorkerSettings::key_hash>,
     "how a partition finds its server: raw, djb2, naive, built_in, sdbm or mixed, BytePS's hashes of its key; "
     "balanced, the server with the fewest bytes so far"},
    {"BPS_HOST_SUM", "", "1", kFlag, worker<&WorkerSettings::host_sum>,
     "1: in a job on several hosts the ranks of a host sum in shared memory first, and one contribution per host "
     "crosses the network; 0 on any rank: every rank sends its own"},
    {"BPS_COMPRESSION", "", "", kText, worker<&WorkerSettings::compression>,
     "how sums of float32, float16 and bfloat16 are compressed between hosts, unless their call says it, as in "
     "int8:feedback=1; empty: not at all; see docs/compression.md"},
    {"BPS_MIN_COMPRESS_BYTES", "BYTEPS_MIN_COMPRESS_BYTES", "65536", whole(0),
     worker<&WorkerSettings::min_compress_bytes>, "tensors smaller than this are not compressed by BPS_COMPRESSION"},
    {"BPS_EXACT", "", "0", kFlag, worker<&WorkerSettings::exact>,
     "1: sums and averages of floating point are exact, and rounded once, unless their call says otherwise; see "
     "docs/exact.md"},
    {"BPS_ASYNC", "BYTEPS_ENABLE_ASYNC", "0", kFlag, worker<&WorkerSettings::async>,
     "1: DistributedOptimizer trains asynchronously: servers keep the weights, and no rank waits for another; see "
     "docs/async.md"},
    {"BPS_STALENESS", "", "-1", whole(-1, 65534), worker<&WorkerSettings::staleness>,
     "how many steps a rank may be ahead of the slowest one with BPS_ASYNC; -1: any number; 0: training is "
     "synchronous"},
    {"BPS_BUILT_IN_HASH_COEF", "BYTEPS_BUILT_IN_HASH_COEF", "1", whole(1),
     worker<&WorkerSettings::built_in_coefficient>, "coefficient of the key hash built_in"},
    {"BPS_MIXED_MODE_BOUND", "BYTEPS_MIXED_MODE_BOUND", "101", whole(1, 1 << 20), worker<&WorkerSettings::mixed_bound>,
     "bound of the key hash mixed"},
    {"BPS_STAGING_BYTES", "", "67108864", whole(1 << 16), worker<&WorkerSettings::staging_bytes>,
     "bytes of memory, for each worker thread, through which tensors are copied that a server cannot reach itself"},
    {"BPS_GPU_CHUNK_BYTES", "", "4194304", whole(1 << 12, kGiB), worker<&WorkerSettings::gpu_chunk_bytes>,
     "bytes of the chunks in which a GPU's tensors are copied through pinned memory"},
    {"BPS_GPU_CHUNKS", "", "4", whole(1, 1 << 10), worker<&WorkerSettings::gpu_chunks>,
     "number of these chunks for each GPU and group"},
    {"BPS_GPU_HOST_SUM", "", "0", kFlag, worker<&WorkerSettings::gpu_host_sum>,
     "1: the GPUs of a host sum, gather and broadcast among themselves first, by NCCL, and each rank sends its share; "
     "off because it has not run on several GPUs; see docs/choose.md"},
    {"BPS_DEVICE_ROUTE", "", "0", kFlag, worker<&WorkerSettings::device_route>,
     "1: the core itself copies arrays of a GPU, instead of threads of Python; off because it has not run on a real "
     "GPU"},
    {"BPS_CUDA_LIB", "", "libcuda.so.1", kText, worker<&WorkerSettings::cuda_library>,
     "the library of CUDA's driver, for BPS_DEVICE_ROUTE: a name, or a path"},
    {"BPS_GPUDIRECT", "", "0", kFlag, worker<&WorkerSettings::gpudirect>,
     "1: with BPS_DEVICE_ROUTE, RDMA devices read and write the memory of GPUs themselves where they can, and where no "
     "lost server has to be survived (BPS_SERVER_FAILOVER); off because it has not run on a real GPU and card; see "
     "docs/choose.md"},
    // Servers
    {"BPS_SERVER_ENGINE_THREAD", "BYTEPS_SERVER_ENGINE_THREAD", "0", whole(0, 64), server<&ServerSettings::loops>,
     "threads of a server that sum (server loops); 0: on a dedicated server one per core and at most 4, in a worker as "
     "many as BPS_PUSH_THREAD"},
    {"BPS_SERVER_WINDOW", "", "4", whole(1, 4096), server<&ServerSettings::window>,
     "partitions that a worker may have under way to one server thread; servers that sum less than others grant fewer, "
     "2 at least"},
    {"BPS_SERVER_MEMORY", "", "4294967296", whole(0), server<&ServerSettings::slot_memory>,
     "bytes on one server for partitions that are under way to it; 0: no limit"},
    {"BPS_SUM_GBPS",
     "",
     "",
     {.kind = Range::Kind::kNumber},
     server<&ServerSettings::sum_gbps>,
     "Gbit/s of pushes that this server, or the one inside this worker, can add; empty: it is measured at the start; "
     "counts where the speed of a link is known (BPS_LINK_GBPS)"},
    // Pools of servers
    {"BPS_POOL", "", "", kText, pools<&PoolSettings::names>,
     "pools that `bps run` asks for servers, as in dpu1,dpu2:9030"},
    {"BPS_POOL_KEY_FILE", "", "", kText, pools<&PoolSettings::key_file>,
     "file with the key of a user of pools; of a pool: with the keys of all its users"},
    {"BPS_POOL_HOST", "", "", kText, pools<&PoolSettings::host>,
     "address that a pool listens at; empty: all of its machine"},
    {"BPS_POOL_PORT", "", "9030", whole(1, 65535), pools<&PoolSettings::port>,
     "port that a pool listens at, and that pools have whose port is not named"},
    {"BPS_POOL_CORES", "", "0", whole(0, 4096), pools<&PoolSettings::cores>,
     "cores that a pool gives to jobs; 0: all that it may use. More than those: jobs share them"},
    {"BPS_POOL_MEMORY", "", "0", whole(0), pools<&PoolSettings::memory>,
     "bytes of memory that a pool gives to jobs; 0: three quarters of what it may use"},
    {"BPS_POOL_JOBS", "", "4", whole(1, 256), pools<&PoolSettings::jobs>,
     "jobs that a pool serves at a time; a job that says nothing of cores and memory gets this part of them"},
    {"BPS_POOL_USER_JOBS", "", "0", whole(0, 256), pools<&PoolSettings::user_jobs>,
     "jobs of one user that a pool serves at a time; 0: as many as of all users"},
    {"BPS_POOL_JOB_CORES", "", "0", whole(0, 64), pools<&PoolSettings::job_cores>,
     "most cores that a pool gives to one job, which asks by BPS_SERVER_ENGINE_THREAD; 0: all of the pool"},
    {"BPS_POOL_JOB_MEMORY", "", "0", whole(0), pools<&PoolSettings::job_memory>,
     "most bytes that a pool gives to one job, which asks by BPS_SERVER_MEMORY; 0: all of the pool"},
    // Deadlines
    {"BPS_TIMEOUT", "", "300", kSeconds, deadline<&Deadlines::operation>,
     "seconds until an operation that does not complete fails"},
    {"BPS_JOIN_TIMEOUT", "", "60", kSeconds, deadline<&Deadlines::join>, "seconds to wait for all members at start-up"},
    {"BPS_SHUTDOWN_TIMEOUT", "", "60", kSeconds, deadline<&Deadlines::shutdown>,
     "seconds to wait for the other workers at shutdown"},
    {"BPS_HEARTBEAT_TIMEOUT", "PS_HEARTBEAT_TIMEOUT", "10", kSeconds, deadline<&Deadlines::heartbeat>,
     "seconds of silence after which a member counts as lost, for hosts and processes that hang; the end of a process "
     "and a cut network are noticed sooner"},
    {"BPS_SCHEDULER_PATIENCE", "", "0", whole(0, kMany), deadline<&Deadlines::scheduler>,
     "seconds that a job with BPS_MIN_WORKERS waits for another scheduler after the loss of the first; `bps run` sets "
     "30, and starts one"},
    {"BPS_RESUME_TIMEOUT", "", "600", whole(0, kMany), deadline<&Deadlines::resume>,
     "seconds that scheduler and servers wait for resume() after suspend(); 0: they end with the workers"},
    {"BPS_SCHEDULER_STATE", "", "", kText, job<&JobSettings::scheduler_state>,
     "file that tells a scheduler, when it is started again, which job it had; use one for each job"},
    // Diagnosis
    {"BPS_LOG_LEVEL", "BYTEPS_LOG_LEVEL", "WARNING", words("ERROR WARNING WARN INFO DEBUG FATAL TRACE"), into_log_level,
     "ERROR, WARNING, INFO or DEBUG, in either case; BytePS's FATAL means ERROR, TRACE means DEBUG, NCCL's WARN means "
     "WARNING"},
    {"BPS_DUMP_DIR", "", "", kText, into_dump_dir,
     "folder where each rank writes what it was doing when an operation failed, at most once in 10 s; `bps why DIR` "
     "reads it"},
    {"BPS_METRICS_PORT", "", "", whole(1, 65535), metrics<&MetricsSettings::port>,
     "port of http://HOST:PORT/metrics for Prometheus: workers add their local rank, servers and the scheduler "
     "nothing; empty: not served"},
    {"BPS_METRICS_HOST", "", "127.0.0.1", kText, metrics<&MetricsSettings::host>,
     "address at which metrics are served, to everybody who reaches it; * : all addresses of this host"},
    {"BPS_TRACE", "", "", kText, trace<&TraceSettings::folder>,
     "folder for a trace of every partition; empty: no trace; see docs/observability.md"},
    {"BPS_TRACE_ON", "BYTEPS_TRACE_ON", "0", kFlag, trace<&TraceSettings::as_byteps>,
     "1: a trace as in BytePS: workers write rounds 10 to 20 to LOCAL_RANK/comm.json in the folder BPS_TRACE_DIR"},
    {"BPS_TRACE_DIR", "BYTEPS_TRACE_DIR", ".", kText, trace<&TraceSettings::byteps_folder>, "see BPS_TRACE_ON"},
    {"BPS_TRACE_START_STEP", "BYTEPS_TRACE_START_STEP", "", whole(0, UINT32_MAX), trace<&TraceSettings::first_round>,
     "first round of each name that is traced, from 0"},
    {"BPS_TRACE_END_STEP", "BYTEPS_TRACE_END_STEP", "", whole(0, UINT32_MAX), trace<&TraceSettings::last_round>,
     "last round of each name that is traced; empty: no last one"},
    {"BPS_SPIN_US", "", "-1", whole(-1, 1'000'000), transport<&TransportSettings::spin_us>,
     "microseconds that a thread polls before it sleeps; -1: 0 where cores are scarce, else 20 for threads of bps_rdma "
     "and 50 for callers"},
    {"BPS_FAULT", "", "", kText, transport<&TransportSettings::fault>,
     "for tests: make the transports misbehave, e.g. refuse=0.1,partial=0.3,hold=0.5,seed=7"},
};

}  // namespace

std::span<const Setting> settings_table() {
  return kTable;
}

}  // namespace bps
