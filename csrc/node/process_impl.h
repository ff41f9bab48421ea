// What stands behind Process. One class in several rooms: process.cc starts and ends it, loops.cc makes the loops with
// their transports and server_loops, doors.cc lets callers in, worker_loops.cc connects the worker to the servers.
#pragma once

#include <atomic>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "node/process.h"
#include "server/server_loop.h"
#include "transport/listener.h"
#include "transport/rdma/rdma.h"
#include "transport/reactor.h"
#include "van/scheduler.h"
#include "van/van.h"
#include "worker/worker.h"

namespace bps::node {

// A loop of this process with what runs on it.
struct Loop {
  std::unique_ptr<transport::Reactor> reactor;
  std::unique_ptr<worker::WorkerLoop> worker_loop;
  std::unique_ptr<server::ServerLoop> server_loop;
  // Callers that came before the membership was known, and the transport they came by.
  std::vector<std::pair<std::string, std::unique_ptr<transport::IncomingConnection>>> early;
  std::vector<van::Group> groups;
};

class Process::Impl {
 public:
  Impl(const Config& config, const Startup& startup);
  ~Impl() { take_down(); }

  void start();
  bool shutdown(double timeout_s);
  void take_down();

  const Config config_;
  const Startup startup_;
  const std::vector<std::string> allowed_;  // transports, best first
  const transport::rdma::RdmaOptions rdma_options_;
  transport::Credentials credentials_;
  std::unique_ptr<van::Scheduler> scheduler_;
  std::unique_ptr<van::Van> van_;
  std::vector<std::unique_ptr<Loop>> loops_;
  std::vector<std::unique_ptr<transport::Listener>> listeners_;  // these live on the van's loop
  std::unique_ptr<transport::rdma::RdmaListener> rdma_listener_;
  std::unique_ptr<worker::Worker> worker_;
  std::vector<std::string> routes_;

 private:
  bool is_worker() const { return startup_.worker_rank != van::kNoRank; }
  bool is_server() const { return startup_.server_rank != van::kNoRank; }
  bool allows(std::string_view transport) const;
  void make_scheduler();
  van::VanEvents events();
  template <typename F>
  void on_van(F task);

  // loops.cc
  void find_rails();
  void make_loops();
  void make_rdma_transports();
  void add(transport::Reactor& reactor, std::unique_ptr<transport::Transport> transport);
  void make_server_loops();

  // doors.cc
  void open_listeners(van::Node& self);
  void dispatch(const std::string& transport, std::unique_ptr<transport::IncomingConnection> incoming);
  void accept_connection(Loop& loop, const std::string& transport,
                         std::unique_ptr<transport::IncomingConnection> incoming);

  // worker_loops.cc
  void make_worker();
  void make_worker_loop(std::size_t index, worker::WorkerLoopOptions options, const Deadline& deadline);
  void connect(Loop& loop, std::size_t index, const van::Node& server, std::size_t server_loop, std::size_t place,
               const Deadline& deadline);
  void connect_self(Loop& loop, const transport::Hello& hello, const std::string& name, std::uint32_t rank,
                    std::size_t place, const Deadline& deadline);
  void connect_by(const std::string& how, Loop& loop, const transport::Hello& hello, const van::Node& server,
                  std::size_t place, const Deadline& deadline);

  std::mutex mutex_;  // worker_ and server_loops appear while the van already reports
  std::vector<std::pair<std::uint32_t, std::string>> early_losses_;
  std::atomic<bool> leaving_{false};
  std::size_t worker_loops_ = 0;
  std::size_t server_loops_ = 0;
  std::vector<transport::rdma::Rail> rails_;  // none: rdma is not used
};

// Runs on the van's thread, where doors belong, and waits.
template <typename F>
void Process::Impl::on_van(F task) {
  auto packaged = std::make_shared<std::packaged_task<void()>>(std::move(task));
  auto result = packaged->get_future();
  van_->loop().post([packaged] { (*packaged)(); });
  result.get();
}

}  // namespace bps::node
