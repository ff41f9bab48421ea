#include "node/process.h"

#include <unistd.h>

#include <algorithm>
#include <thread>

#include "core/log.h"
#include "node/local_address.h"
#include "node/process_impl.h"
#include "van/select.h"

namespace bps::node {
namespace {

constexpr std::chrono::milliseconds kFarewell{300};

}  // namespace

Process::Impl::Impl(const Config& config, const Startup& startup)
    : config_(config),
      startup_(startup),
      allowed_(van::allowed_transports(config.text("BPS_TRANSPORT"))),
      rdma_options_(transport::rdma::RdmaOptions::from(config)) {}

bool Process::Impl::allows(std::string_view transport) const {
  return std::ranges::find(allowed_, transport) != allowed_.end();
}

void Process::Impl::start() {
  credentials_ = transport::Credentials::from(startup_.job, startup_.secret);
  set_log(parse_log_level(config_.text("BPS_LOG_LEVEL")), "pid " + std::to_string(::getpid()));
  if (startup_.hosts_scheduler) make_scheduler();
  van::VanOptions options;
  options.scheduler_host = startup_.hosts_scheduler ? "127.0.0.1" : startup_.scheduler_host;
  options.scheduler_ports = startup_.scheduler_ports;
  if (scheduler_) options.scheduler_ports = {scheduler_->port()};
  options.join_timeout_s = config_.seconds("BPS_JOIN_TIMEOUT");
  options.heartbeat_interval_s = config_.seconds("BPS_HEARTBEAT_INTERVAL");
  options.heartbeat_timeout_s = config_.seconds("BPS_HEARTBEAT_TIMEOUT");
  van_ = std::make_unique<van::Van>(options, credentials_, events());

  find_rails();
  make_loops();
  van::Node self;
  self.worker_rank = startup_.worker_rank;
  self.server_rank = startup_.server_rank;
  self.worker_loops = static_cast<std::uint16_t>(worker_loops_);
  self.server_loops = static_cast<std::uint16_t>(server_loops_);
  self.pid = static_cast<std::uint32_t>(::getpid());
  self.host = host_name();
  self.host_key = van::host_key();
  open_listeners(self);
  van_->join(self, startup_.workers, startup_.servers);
  set_log(parse_log_level(config_.text("BPS_LOG_LEVEL")), van_->self().describe());
  if (is_server()) make_server_loops();
  if (is_worker()) make_worker();
  std::vector<std::pair<std::uint32_t, std::string>> early;
  {
    const std::lock_guard lock(mutex_);
    early.swap(early_losses_);
  }
  for (const auto& [node, why] : early) events().on_lost(node, why);
}

void Process::Impl::make_scheduler() {
  van::SchedulerOptions options;
  options.ports = startup_.scheduler_ports;
  options.workers = startup_.workers;
  options.servers = startup_.servers;
  options.heartbeat_timeout_s = config_.seconds("BPS_HEARTBEAT_TIMEOUT");
  options.join_timeout_s = config_.seconds("BPS_JOIN_TIMEOUT");
  options.balanced = tensor::parse_key_hash(config_.text("BPS_KEY_HASH_FN")) == tensor::KeyHash::kBalanced;
  options.partition_bytes = static_cast<std::uint64_t>(config_.integer("BPS_PARTITION_BYTES", 8, 1 << 30));
  if (startup_.workers == 1 || startup_.scheduler_host == "127.0.0.1" || startup_.scheduler_host == "localhost") {
    options.address = "127.0.0.1";  // nobody else needs to see it
  }
  scheduler_ = std::make_unique<van::Scheduler>(options, credentials_);
}

van::VanEvents Process::Impl::events() {
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
                if (loop.server_loop && node != 0) loop.server_loop->lose_node(node);
              });
            }
          },
      .on_group =
          [this](const van::Group& group) {
            // Waits until each loop knows it: the scheduler tells the workers only after we return.
            for (const auto& loop : loops_) {
              loop->reactor->call([&] {
                loop->groups.push_back(group);
                if (loop->server_loop) loop->server_loop->add_group(group);
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

bool Process::Impl::shutdown(double timeout_s) {
  leaving_ = true;
  bool well = false;
  try {
    well = van_->leave(timeout_s);
  } catch (const Error& error) {  // the scheduler is gone: there is nobody left to say goodbye to
    log_info(std::string("left without goodbye: ") + error.what());
  }
  // Who leaves because of a loss gives the others time to see the same loss first, or they would take him for its
  // cause.
  if (worker_ && worker_->has_lost_anyone()) std::this_thread::sleep_for(kFarewell);
  take_down();
  return well;
}

void Process::Impl::take_down() {
  leaving_ = true;
  for (const auto& loop : loops_) loop->reactor->stop();
  if (van_ && (!listeners_.empty() || rdma_listener_)) {
    on_van([this] {
      listeners_.clear();
      rdma_listener_.reset();
    });
  }
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
  std::unique_ptr<Process> process(new Process(std::make_unique<Impl>(config, startup)));
  process->timeout_s_ = config.seconds("BPS_TIMEOUT");
  process->impl_->start();
  return process;
}

worker::Worker& Process::worker() {
  if (!impl_->worker_) {
    throw Error(ErrorCode::kInvalidArgument, "this process is a server, not a worker", "call this on workers only");
  }
  return *impl_->worker_;
}
van::Van& Process::van() {
  return *impl_->van_;
}
const van::Membership& Process::membership() const {
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
      return std::pair<std::uint64_t, std::uint64_t>(loop->server_loop ? loop->server_loop->slot_bytes() : 0,
                                                     loop->server_loop ? loop->server_loop->open_rounds() : 0);
    });
    slot_bytes += bytes;
    open_rounds += rounds;
  }
  sum.emplace_back("slot_bytes", slot_bytes);
  sum.emplace_back("open_rounds", open_rounds);
  return sum;
}

}  // namespace bps::node
