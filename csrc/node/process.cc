#include "node/process.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <numeric>
#include <thread>

#include "core/hmac.h"
#include "core/log.h"
#include "node/local_address.h"
#include "server/shard.h"
#include "transport/door.h"
#include "transport/fault.h"
#include "transport/reactor.h"
#include "transport/self_transport.h"
#include "transport/shm/shm_transport.h"
#include "transport/tcp/tcp_transport.h"
#include "van/scheduler.h"
#include "van/select.h"
#include "van/van.h"
#include "worker/worker.h"

namespace bps {
namespace {

// A loop of this process with what runs on it.
struct Loop {
  std::unique_ptr<Reactor> reactor;
  std::unique_ptr<Lane> lane;
  std::unique_ptr<Shard> shard;
  // Callers that came before the membership was known.
  struct Early {
    Fd fd;
    Hello hello;
    std::string transport;
  };
  std::vector<Early> early;
  std::vector<Group> groups;
};

std::string random_name() {
  std::array<std::byte, 12> bytes;
  random_bytes(bytes);
  std::string name = "bps-" + std::to_string(::getpid()) + "-";
  for (const std::byte b : bytes) {
    constexpr char kDigits[] = "0123456789abcdef";
    name += kDigits[static_cast<unsigned>(b) >> 4];
    name += kDigits[static_cast<unsigned>(b) & 15];
  }
  return name;
}

}  // namespace

class Process::Impl {
 public:
  Impl(const Config& config, const Startup& startup) : config_(config), startup_(startup) {}
  ~Impl() { take_down(); }

  void start();
  bool shutdown(double timeout_s);
  void take_down();

  const Config config_;
  const Startup startup_;
  Credentials credentials_;
  std::unique_ptr<Scheduler> scheduler_;
  std::unique_ptr<Van> van_;
  std::vector<std::unique_ptr<Loop>> loops_;
  std::vector<std::unique_ptr<Door>> doors_;  // live on the van's loop
  std::unique_ptr<Worker> worker_;
  std::vector<std::string> routes_;

 private:
  bool is_worker() const { return startup_.worker_rank != kNoRank; }
  bool is_server() const { return startup_.server_rank != kNoRank; }
  void make_loops();
  void open_doors(bps::Node& self);
  void let_in(Loop& loop, const std::string& transport, Fd fd, const Hello& hello);
  void make_shards();
  void make_worker();
  void connect(Loop& loop, std::size_t index, const bps::Node& server, std::size_t shard, std::size_t place,
               const Deadline& deadline);
  VanEvents events();
  template <typename F>
  void on_van(F task);

  std::mutex mutex_;  // worker_ and shards appear while the van already reports
  std::vector<std::pair<std::uint32_t, std::string>> early_losses_;
  std::atomic<bool> leaving_{false};
  std::size_t lanes_ = 0;
  std::size_t shards_ = 0;
};

// Runs on the van's thread, where doors belong, and waits.
template <typename F>
void Process::Impl::on_van(F task) {
  auto packaged = std::make_shared<std::packaged_task<void()>>(std::move(task));
  auto result = packaged->get_future();
  van_->loop().post([packaged] { (*packaged)(); });
  result.get();
}

void Process::Impl::start() {
  credentials_ = Credentials::from(startup_.job, startup_.secret);
  set_log(parse_log_level(config_.text("BPS_LOG_LEVEL")), "pid " + std::to_string(::getpid()));
  const std::uint64_t partition = static_cast<std::uint64_t>(config_.integer("BPS_PARTITION_BYTES", 8, 1 << 30));
  if (startup_.hosts_scheduler) {
    SchedulerOptions options;
    options.ports = startup_.scheduler_ports;
    options.workers = startup_.workers;
    options.servers = startup_.servers;
    options.heartbeat_timeout_s = config_.seconds("BPS_HEARTBEAT_TIMEOUT");
    options.join_timeout_s = config_.seconds("BPS_JOIN_TIMEOUT");
    options.balanced = parse_key_hash(config_.text("BPS_KEY_HASH_FN")) == KeyHash::kBalanced;
    options.partition_bytes = partition;
    if (startup_.workers == 1 || startup_.scheduler_host == "127.0.0.1" || startup_.scheduler_host == "localhost") {
      options.address = "127.0.0.1";  // nobody else needs to see it
    }
    scheduler_ = std::make_unique<Scheduler>(options, credentials_);
  }
  VanOptions options;
  options.scheduler_host = startup_.hosts_scheduler ? "127.0.0.1" : startup_.scheduler_host;
  options.scheduler_ports = startup_.scheduler_ports;
  if (scheduler_) options.scheduler_ports = {scheduler_->port()};
  options.join_timeout_s = config_.seconds("BPS_JOIN_TIMEOUT");
  options.heartbeat_interval_s = config_.seconds("BPS_HEARTBEAT_INTERVAL");
  options.heartbeat_timeout_s = config_.seconds("BPS_HEARTBEAT_TIMEOUT");
  van_ = std::make_unique<Van>(options, credentials_, events());

  make_loops();
  bps::Node self;
  self.worker_rank = startup_.worker_rank;
  self.server_rank = startup_.server_rank;
  self.lanes = static_cast<std::uint16_t>(lanes_);
  self.shards = static_cast<std::uint16_t>(shards_);
  self.pid = static_cast<std::uint32_t>(::getpid());
  self.host = host_name();
  self.host_key = host_key();
  if (is_server()) open_doors(self);
  van_->join(self, startup_.workers, startup_.servers);
  set_log(parse_log_level(config_.text("BPS_LOG_LEVEL")), van_->self().describe());
  if (is_server()) make_shards();
  if (is_worker()) make_worker();
  std::vector<std::pair<std::uint32_t, std::string>> early;
  {
    const std::lock_guard lock(mutex_);
    early.swap(early_losses_);
  }
  for (const auto& [node, why] : early) events().on_lost(node, why);
}

VanEvents Process::Impl::events() {
  return {
      .on_lost =
          [this](std::uint32_t node, const std::string& why) {
            const std::lock_guard lock(mutex_);
            if (is_worker() && !worker_) {
              early_losses_.emplace_back(node, why);
              return;
            }
            if (worker_ && !leaving_) worker_->lose_node(node, why);
            for (const auto& loop : loops_) {
              loop->reactor->loop().post([&loop = *loop, node] {
                if (loop.shard && node != 0) loop.shard->lose_node(node);
              });
            }
          },
      .on_group =
          [this](const Group& group) {
            // Waits until each loop knows it: the scheduler tells the workers only after we return.
            for (const auto& loop : loops_) {
              loop->reactor->call([&] {
                loop->groups.push_back(group);
                if (loop->shard) loop->shard->add_group(group);
              });
            }
          },
      .on_tensor_failed =
          [this](std::uint32_t tensor, const std::string& why) {
            const std::lock_guard lock(mutex_);
            if (worker_) worker_->fail_tensor(tensor, why);
          },
  };
}

void Process::Impl::make_loops() {
  const auto cores = static_cast<std::int64_t>(std::max(1U, std::thread::hardware_concurrency()));
  lanes_ = is_worker() ? static_cast<std::size_t>(config_.integer("BPS_PUSH_THREAD", 1, 64)) : 0;
  shards_ = is_server() ? static_cast<std::size_t>(config_.integer("BPS_SERVER_ENGINE_THREAD", 0, 64)) : 0;
  if (startup_.joint) {
    // A loop carries a lane and a shard, so that what a rank sends itself never changes threads.
    lanes_ = shards_ = std::max(lanes_, shards_);
  } else if (is_server() && shards_ == 0) {
    shards_ = static_cast<std::size_t>(std::min<std::int64_t>(cores, 4));
  }
  const std::size_t count = std::max(lanes_, shards_);
  auto spin = config_.integer("BPS_SPIN_US", -1, 1'000'000);
  if (spin < 0) spin = static_cast<std::int64_t>(count * startup_.processes_on_host) < cores ? 20 : 0;
  const FaultPlan faults = FaultPlan::parse(config_.text("BPS_FAULT"));
  for (std::size_t i = 0; i < count; ++i) {
    auto loop = std::make_unique<Loop>();
    loop->reactor = std::make_unique<Reactor>("bps-loop-" + std::to_string(i), static_cast<int>(spin));
    Reactor& reactor = *loop->reactor;
    reactor.add(std::make_unique<SelfTransport>(reactor.counters()));
    const auto add = [&](std::unique_ptr<Transport> transport) {
      if (faults.any()) transport = std::make_unique<FaultTransport>(std::move(transport), faults);
      reactor.add(std::move(transport));
    };
    add(std::make_unique<ShmTransport>(reactor.loop(), credentials_, reactor.counters(), config_.flag("BPS_SHM_CMA")));
    add(std::make_unique<TcpTransport>(reactor.loop(), credentials_, reactor.counters(),
                                       config_.text("BPS_TCP_CONGESTION")));
    loops_.push_back(std::move(loop));
  }
  for (const auto& loop : loops_) loop->reactor->start();
}

void Process::Impl::open_doors(bps::Node& self) {
  const std::string host =
      local_address(config_.text("BPS_NODE_HOST"), config_.text("BPS_INTERFACE"), startup_.scheduler_host);
  const std::string local_name = random_name();
  on_van([&] {
    const auto door = [&](Fd listener, std::string transport) {
      doors_.push_back(std::make_unique<Door>(van_->loop(), std::move(listener), credentials_,
                                              [this, transport = std::move(transport)](Fd fd, const Hello& hello) {
                                                if (hello.shard >= shards_ || hello.plane == Plane::kVan) return;
                                                Loop& loop = *loops_[hello.shard];
                                                auto moved = std::make_shared<Fd>(std::move(fd));
                                                loop.reactor->loop().post([this, &loop, transport, moved, hello] {
                                                  let_in(loop, transport, std::move(*moved), hello);
                                                });
                                              }));
    };
    Fd tcp = Door::listen_tcp(host, 0);
    const std::string address = TcpTransport::make_address(host, Door::port_of(tcp.get()));
    const auto as_address = [](const std::string& text) {
      const auto bytes = as_bytes(text);
      return Bytes(bytes.begin(), bytes.end());
    };
    self.addresses.push_back({"tcp", as_address(address)});
    door(std::move(tcp), "tcp");
    self.addresses.push_back({"shm", as_address(local_name)});
    door(Door::listen_local(local_name), "shm");
  });
}

void Process::Impl::let_in(Loop& loop, const std::string& transport, Fd fd, const Hello& hello) {
  if (!loop.shard) {
    loop.early.push_back({std::move(fd), hello, transport});
    return;
  }
  Transport* way = loop.reactor->transport(transport);
  Endpoint* endpoint = way->accept(std::move(fd), hello, *loop.shard);
  loop.shard->add_endpoint(endpoint, way);
}

void Process::Impl::make_shards() {
  ShardOptions options;
  options.window = static_cast<std::uint32_t>(config_.integer("BPS_SERVER_WINDOW", 1, 4096));
  options.largest_partition = 1 << 30;
  for (const auto& loop : loops_) {
    loop->reactor->call([&, this] {
      Transport* tcp = loop->reactor->transport("tcp");
      loop->shard =
          std::make_unique<Shard>(options, van_->membership(), std::vector<Transport*>{tcp}, loop->reactor->counters());
      for (const Group& group : loop->groups) loop->shard->add_group(group);
      loop->reactor->add(loop->shard.get());
      for (Loop::Early& early : loop->early) let_in(*loop, early.transport, std::move(early.fd), early.hello);
      loop->early.clear();
    });
  }
}

void Process::Impl::make_worker() {
  const Membership& members = van_->membership();
  WorkerOptions options;
  options.key_map.hash = parse_key_hash(config_.text("BPS_KEY_HASH_FN"));
  options.key_map.servers = members.servers;
  options.key_map.workers = members.workers;
  options.key_map.built_in_coefficient =
      static_cast<std::uint64_t>(config_.integer("BPS_BUILT_IN_HASH_COEF", 1, INT64_MAX));
  options.key_map.mixed_bound = static_cast<std::uint64_t>(config_.integer("BPS_MIXED_MODE_BOUND", 1, 1 << 20));
  options.partition_bytes = static_cast<std::uint64_t>(config_.integer("BPS_PARTITION_BYTES", 8, 1 << 30));
  options.min_partition_bytes = static_cast<std::uint64_t>(config_.integer("BPS_MIN_PARTITION_BYTES", 8, 1 << 30));
  options.shards_per_server = members.server(0)->shards;
  for (std::uint32_t rank = 0; rank < members.servers; ++rank) {
    if (members.server(rank)->shards != options.shards_per_server) {
      throw Error(ErrorCode::kMismatch,
                  members.server(rank)->describe() + " runs another number of loops than server 0",
                  "set BYTEPS_SERVER_ENGINE_THREAD to the same number on all servers");
    }
  }
  for (std::uint32_t rank = 0; startup_.joint && rank < members.workers; ++rank) {
    options.own_server.push_back(static_cast<std::uint32_t>(members.worker(rank)->server_rank));
  }
  auto worker = std::make_unique<Worker>(options, *van_);

  LaneOptions lane_options;
  lane_options.servers = members.servers * options.shards_per_server;
  lane_options.largest_partition = options.partition_bytes;
  lane_options.staging_bytes = static_cast<std::uint64_t>(config_.integer("BPS_STAGING_BYTES", 1 << 16, INT64_MAX));
  const auto credit = static_cast<std::uint64_t>(config_.integer("BPS_SCHEDULING_CREDIT", 0, INT64_MAX));
  // BytePS counts partitions; a number too small to be bytes is one of those.
  lane_options.scheduling_credit = credit < 1000 ? credit * options.partition_bytes : credit;
  const Deadline deadline = Deadline::after(config_.seconds("BPS_JOIN_TIMEOUT"));
  for (std::size_t i = 0; i < lanes_; ++i) {
    Loop& loop = *loops_[i];
    lane_options.index = i;
    loop.reactor->call([&] {
      loop.lane = std::make_unique<Lane>(lane_options, loop.reactor->loop(), loop.reactor->counters());
      loop.lane->when_lost = [this](std::uint32_t server_rank, const std::string& why) {
        const std::lock_guard lock(mutex_);
        if (worker_ && !leaving_) worker_->lose_server(server_rank, why);
      };
    });
    for (std::uint32_t rank = 0; rank < members.servers; ++rank) {
      for (std::size_t shard = 0; shard < options.shards_per_server; ++shard) {
        if (!Worker::meets(i, lanes_, shard, options.shards_per_server)) continue;
        connect(loop, i, *members.server(rank), shard, rank * options.shards_per_server + shard, deadline);
      }
    }
    loop.reactor->call([&] { loop.reactor->add(loop.lane.get()); });
    worker->add_lane(loop.lane.get(), loop.reactor.get());
  }
  const std::lock_guard lock(mutex_);
  worker_ = std::move(worker);
}

void Process::Impl::connect(Loop& loop, std::size_t index, const bps::Node& server, std::size_t shard,
                            std::size_t place, const Deadline& deadline) {
  const std::string how = select_transport(config_.text("BPS_TRANSPORT"), van_->self(), server);
  if (index == 0 && shard == 0) routes_.push_back(how);
  Hello hello{.node = van_->self().id,
              .lane = static_cast<std::uint16_t>(index),
              .shard = static_cast<std::uint16_t>(shard),
              .plane = Plane::kControl};
  const std::string name = server.describe();
  const auto rank = static_cast<std::uint32_t>(server.server_rank);
  if (how == "self") {
    loop.reactor->call([&] {
      auto* self = static_cast<SelfTransport*>(loop.reactor->transport("self"));
      const auto [control, control_there] = self->connect_pair(hello);
      hello.plane = Plane::kData;
      const auto [data, data_there] = self->connect_pair(hello);
      loop.shard->add_endpoint(control_there, self);
      loop.shard->add_endpoint(data_there, self);
      loop.lane->add_server(place, rank, name, self, control, {data});
    });
    return;
  }
  Transport* way = loop.reactor->transport(how);
  const Bytes& address = *address_of(server, how);
  // Connecting blocks, so it happens here and not on the loop, which must go on letting others in.
  auto control = way->connect(address, hello, deadline, name);
  hello.plane = Plane::kData;
  std::vector<std::unique_ptr<Endpoint>> data;
  const auto streams = how == "tcp" ? config_.integer("BPS_TCP_STREAMS", 1, 64) : 1;
  for (std::int64_t i = 0; i < streams; ++i) data.push_back(way->connect(address, hello, deadline, name));
  loop.reactor->call([&] {
    std::vector<Endpoint*> attached;
    control->sink = loop.lane.get();
    for (auto& endpoint : data) {
      endpoint->sink = loop.lane.get();
      attached.push_back(way->attach(std::move(endpoint)));
    }
    Endpoint* control_attached = way->attach(std::move(control));
    loop.lane->add_server(place, rank, name, way, control_attached, attached);
  });
}

bool Process::Impl::shutdown(double timeout_s) {
  leaving_ = true;
  bool well = false;
  try {
    well = van_->leave(timeout_s);
  } catch (const Error& error) {  // the scheduler is gone: there is nobody left to say goodbye to
    log_info(std::string("left without goodbye: ") + error.what());
  }
  take_down();
  return well;
}

void Process::Impl::take_down() {
  leaving_ = true;
  for (const auto& loop : loops_) loop->reactor->stop();
  if (van_ && !doors_.empty()) on_van([this] { doors_.clear(); });
  {
    const std::lock_guard lock(mutex_);
    worker_.reset();
  }
  van_.reset();  // its thread may still post to the loops until here
  loops_.clear();
  scheduler_.reset();
}

Process::Process(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Process::~Process() = default;

std::unique_ptr<Process> Process::start(const Config& config, const Startup& startup) {
  const std::string transport = config.text("BPS_TRANSPORT");
  if (transport != "auto" && transport != "shm" && transport != "tcp" && transport != "rdma") {
    throw Error(ErrorCode::kInvalidArgument, "BPS_TRANSPORT='" + transport + "' is not a transport",
                "set it to auto, shm, tcp or rdma");
  }
  if (transport == "rdma") {
    throw Error(ErrorCode::kUnreachable, "this version has no RDMA transport yet", "set BPS_TRANSPORT=auto");
  }
  std::unique_ptr<Process> process(new Process(std::make_unique<Impl>(config, startup)));
  process->timeout_s_ = config.seconds("BPS_TIMEOUT");
  process->impl_->start();
  return process;
}

Worker& Process::worker() {
  if (!impl_->worker_) {
    throw Error(ErrorCode::kInvalidArgument, "this process is a server, not a worker", "call this on workers only");
  }
  return *impl_->worker_;
}
Van& Process::van() {
  return *impl_->van_;
}
const Membership& Process::membership() const {
  return impl_->van_->membership();
}
bool Process::shutdown(double timeout_s) {
  return impl_->shutdown(timeout_s);
}
bool Process::wait_for_end() {
  return impl_->van_->wait_for_end();
}
std::vector<std::string> Process::routes() const {
  return impl_->routes_;
}

std::vector<std::pair<std::string, std::uint64_t>> Process::metrics() const {
  std::vector<std::pair<std::string, std::uint64_t>> sum = Counters().list();
  std::uint64_t slot_bytes = 0;
  std::uint64_t open_rounds = 0;
  for (const auto& loop : impl_->loops_) {
    const auto one = loop->reactor->counters().list();
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i].second += one[i].second;
    const auto [bytes, rounds] = loop->reactor->call([&] {
      return std::pair<std::uint64_t, std::uint64_t>(loop->shard ? loop->shard->slot_bytes() : 0,
                                                     loop->shard ? loop->shard->open_rounds() : 0);
    });
    slot_bytes += bytes;
    open_rounds += rounds;
  }
  sum.emplace_back("slot_bytes", slot_bytes);
  sum.emplace_back("open_rounds", open_rounds);
  return sum;
}

}  // namespace bps
