// SPDX-License-Identifier: Apache-2.0
// Runs a pool: it waits for jobs, and starts a server for each that may have one.
//
// A thread of its own deals with strangers, as with those of a job (transport/listener.h). The thread that calls run()
// deals with users, once they have proved who they are. Each user may have a few connections at a time. A connection is
// closed when nothing is asked for two minutes.
//
// run() belongs to one thread, metrics() to that of the metrics. The constructor throws.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/event_loop.h"
#include "core/settings.h"
#include "node/metrics_server.h"
#include "pool/jobs.h"
#include "pool/key_file.h"
#include "transport/listener.h"
#include "transport/message_stream.h"

namespace bps::pool {

class Pool {
 public:
  explicit Pool(const Settings& settings);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  std::uint16_t port() const { return port_; }
  const Jobs& jobs() const { return jobs_; }
  // Runs until SIGTERM or SIGINT comes, which are blocked in all threads, and returns its number. Reads the keys again
  // at SIGHUP. After SIGINT no server is left; after SIGTERM all go on.
  int run();

 private:
  struct Session {
    explicit Session(std::string name, transport::AuthenticatedSocket& socket);

    std::string user;
    Digest key;
    transport::MessageStream stream;
    std::vector<std::uint64_t> leases{};
    Timer expiry{};
  };
  using Sessions = std::list<Session>;

  void read_users();
  transport::Credentials credentials_of_job(const transport::JobId& job) const;
  void enter(transport::AuthenticatedSocket&& socket);
  void answer(Sessions::iterator session, std::span<const std::byte> message);
  Reply answer_to(Session& session, const Request& request);
  void close(Sessions::iterator session);
  void watch_jobs();
  void on_signal();
  MetricFamilies metrics() const;

  const Settings settings_;
  const std::uint16_t port_;
  Fd listening_;
  // This belongs to the listener's thread.
  std::map<transport::JobId, UserKey> users_;

  EventLoop loop_;
  mutable std::mutex mutex_;  // guards the jobs, for the thread of the metrics
  Jobs jobs_;
  Sessions sessions_;
  Timer look_;  // set while there are jobs
  Fd signals_;
  int ended_by_ = 0;
  std::uint64_t refused_requests_ = 0;
  transport::ListenerLoop strangers_;
  std::unique_ptr<transport::Listener> listener_;
  std::unique_ptr<node::MetricsServer> metrics_;
};

}  // namespace bps::pool
