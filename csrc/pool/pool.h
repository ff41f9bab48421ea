// SPDX-License-Identifier: Apache-2.0
// A pool: it waits for jobs, and starts a server for each that may have one.
//
// Strangers are dealt with on a thread of its own, as those of a job are (transport/listener.h); users, once they have
// proved who they are, on the thread that calls run(). Each user may have a few connections at a time, and each of them
// is closed when nothing is asked for two minutes.
//
// Threading: run() on one thread; metrics() on that of the metrics. Errors: the constructor throws.
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
  // Until one of SIGTERM and SIGINT comes, which are blocked in all threads; returns it. At SIGHUP it reads the keys
  // again. After SIGINT no server is left; after SIGTERM all go on.
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
  // These belong to the listener's thread.
  std::map<transport::JobId, UserKey> users_;

  EventLoop loop_;
  mutable std::mutex mutex_;  // of the jobs, for the thread of the metrics
  Jobs jobs_;
  Sessions sessions_;
  Timer look_;  // while there are jobs
  Fd signals_;
  int ended_by_ = 0;
  std::uint64_t refused_requests_ = 0;
  transport::ListenerLoop strangers_;
  std::unique_ptr<transport::Listener> listener_;
  std::unique_ptr<node::MetricsServer> metrics_;
};

}  // namespace bps::pool
