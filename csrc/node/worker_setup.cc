// The worker of a process: its worker_loops, and their connections to the servers.
#include "core/log.h"
#include "node/process_impl.h"
#include "transport/local/self_transport.h"
#include "van/select.h"

namespace bps::node {

void Process::Impl::make_worker() {
  const van::Membership& members = van_->membership();
  worker::WorkerOptions options;
  options.key_map.hash = tensor::parse_key_hash(config_.text("BPS_KEY_HASH_FN"));
  options.key_map.servers = members.servers;
  options.key_map.workers = members.workers;
  options.key_map.built_in_coefficient =
      static_cast<std::uint64_t>(config_.integer("BPS_BUILT_IN_HASH_COEF", 1, INT64_MAX));
  options.key_map.mixed_bound = static_cast<std::uint64_t>(config_.integer("BPS_MIXED_MODE_BOUND", 1, 1 << 20));
  options.partition_bytes = static_cast<std::uint64_t>(config_.integer("BPS_PARTITION_BYTES", 8, 1 << 30));
  options.min_partition_bytes = static_cast<std::uint64_t>(config_.integer("BPS_MIN_PARTITION_BYTES", 8, 1 << 30));
  options.loops_per_server = members.server(0)->server_loops;
  for (std::uint32_t rank = 0; rank < members.servers; ++rank) {
    if (members.server(rank)->server_loops != options.loops_per_server) {
      throw Error(ErrorCode::kMismatch,
                  members.server(rank)->describe() + " runs another number of loops than server 0",
                  "set BYTEPS_SERVER_ENGINE_THREAD to the same number on all servers");
    }
  }
  for (std::uint32_t rank = 0; startup_.joint && rank < members.workers; ++rank) {
    options.own_server.push_back(static_cast<std::uint32_t>(members.worker(rank)->server_rank));
  }
  auto worker = std::make_unique<worker::Worker>(options, *van_);

  worker::WorkerLoopOptions loop_options;
  loop_options.servers = members.servers * options.loops_per_server;
  loop_options.largest_partition = options.partition_bytes;
  loop_options.staging_bytes = static_cast<std::uint64_t>(config_.integer("BPS_STAGING_BYTES", 1 << 16, INT64_MAX));
  const auto credit = static_cast<std::uint64_t>(config_.integer("BPS_SCHEDULING_CREDIT", 0, INT64_MAX));
  // BytePS counts partitions; a number too small to be bytes is one of those.
  loop_options.scheduling_credit = credit < 1000 ? credit * options.partition_bytes : credit;
  const Deadline deadline = Deadline::after(config_.seconds("BPS_JOIN_TIMEOUT"));
  for (std::size_t i = 0; i < worker_loops_; ++i) {
    loop_options.index = i;
    make_worker_loop(i, loop_options, deadline);
    worker->add_loop(loops_[i]->worker_loop.get(), loops_[i]->reactor.get());
  }
  const std::lock_guard lock(mutex_);
  worker_ = std::move(worker);
}

void Process::Impl::make_worker_loop(std::size_t index, worker::WorkerLoopOptions options, const Deadline& deadline) {
  Loop& loop = *loops_[index];
  loop.reactor->call([&] {
    loop.worker_loop = std::make_unique<worker::WorkerLoop>(options, *loop.reactor);
    loop.worker_loop->when_lost = [this](std::uint32_t server_rank, const std::string& why) {
      const std::lock_guard lock(mutex_);
      if (worker_ && !leaving_) worker_->lose_server(server_rank, why);
    };
  });
  const van::Membership& members = van_->membership();
  const std::size_t server_loops = members.server(0)->server_loops;
  for (std::uint32_t rank = 0; rank < members.servers; ++rank) {
    for (std::size_t server_loop = 0; server_loop < server_loops; ++server_loop) {
      if (!worker::Worker::meets(index, worker_loops_, server_loop, server_loops)) continue;
      connect(loop, index, *members.server(rank), server_loop, rank * server_loops + server_loop, deadline);
    }
  }
  loop.reactor->call([&] { loop.reactor->add(loop.worker_loop.get()); });
}

void Process::Impl::connect(Loop& loop, std::size_t index, const van::Node& server, std::size_t server_loop,
                            std::size_t place, const Deadline& deadline) {
  std::string how = van::select_transport(allowed_, van_->self(), server);
  const transport::Hello hello{.node = van_->self().id,
                               .client_loop = static_cast<std::uint16_t>(index),
                               .server_loop = static_cast<std::uint16_t>(server_loop),
                               .plane = transport::Plane::kControl};
  if (how == "self") {
    connect_self(loop, hello, server.describe(), static_cast<std::uint32_t>(server.server_rank), place, deadline);
  } else if (how == "rdma" && allows("tcp")) {
    try {
      // Half of the time: the other half is for tcp.
      connect_by(how, loop, hello, server, place, Deadline::after(deadline.left_ms() / 2e3));
    } catch (const Error& error) {  // both have RDMA, and yet no way: networks of their own, most likely
      if (error.code() != ErrorCode::kUnreachable && error.code() != ErrorCode::kTransport) throw;
      log_warning(std::string(error.what()) + " (" + error.hint() + "); tcp is used instead");
      how = "tcp";
      connect_by(how, loop, hello, server, place, deadline);
    }
  } else {
    connect_by(how, loop, hello, server, place, deadline);
  }
  if (index == 0 && server_loop == 0) routes_.push_back(how);
}

void Process::Impl::connect_self(Loop& loop, const transport::Hello& hello, const std::string& name, std::uint32_t rank,
                                 std::size_t place, const Deadline& deadline) {
  loop.reactor->call([&] {
    auto* self = static_cast<transport::local::SelfTransport*>(loop.reactor->transport("self"));
    const transport::ConnectRequest request{.address = {}, .hello = hello, .deadline = deadline, .whom = name};
    worker::ServerConnection& server = loop.worker_loop->add_server(place, rank, name, *self);
    transport::ControlEndpoint* control = self->attach(self->connect_control(request), server);
    loop.server_loop->accept(self->incoming(), self);
    transport::DataEndpoint* data = self->attach(self->connect_data(request), server);
    loop.server_loop->accept(self->incoming(), self);
    loop.worker_loop->open(server, control, {data});
  });
}

void Process::Impl::connect_by(const std::string& how, Loop& loop, const transport::Hello& hello,
                               const van::Node& server, std::size_t place, const Deadline& deadline) {
  transport::Transport* way = loop.reactor->transport(how);
  const transport::ConnectRequest request{
      .address = *address_of(server, how), .hello = hello, .deadline = deadline, .whom = server.describe()};
  // Connecting blocks, so it happens here and not on the loop, which must go on accepting others.
  auto control = way->connect_control(request);
  std::vector<std::unique_ptr<transport::DataEndpoint>> data;
  const std::int64_t streams = how == "tcp"    ? config_.integer("BPS_TCP_STREAMS", 1, 64)
                               : how == "rdma" ? rdma_options_.data_queue_pairs
                                               : 1;
  for (std::int64_t i = 0; i < streams; ++i) data.push_back(way->connect_data(request));
  loop.reactor->call([&] {
    worker::ServerConnection& made =
        loop.worker_loop->add_server(place, static_cast<std::uint32_t>(server.server_rank), request.whom, *way);
    std::vector<transport::DataEndpoint*> attached;
    for (auto& endpoint : data) attached.push_back(way->attach(std::move(endpoint), made));
    loop.worker_loop->open(made, way->attach(std::move(control), made), std::move(attached));
  });
}

}  // namespace bps::node
