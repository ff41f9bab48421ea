// SPDX-License-Identifier: Apache-2.0
// Measures how many bytes per second a link carries. A client writes some bytes to a listener of a process on another
// host, which throws them away and confirms each round by one byte.
//
// The connection belongs to the job, as all others do; a host opens one when it joins.
#pragma once

#include <cstddef>
#include <list>

#include "core/event_loop.h"
#include "transport/handshake.h"
#include "transport/transport.h"

namespace bps::transport::tcp {

inline constexpr std::size_t kProbeBytes = 512 << 10;
inline constexpr int kProbeRounds = 3;

// Returns the bytes per second of the fastest round, by the first rail of the peer that published `request.address`.
// Blocks. Throws what connecting throws.
double measure_link(const ConnectRequest& request, const Credentials& credentials);

// Runs the side that receives. Belongs to the thread of `loop`.
class ProbeSink {
 public:
  explicit ProbeSink(EventLoop& loop) : loop_(loop) {}
  ~ProbeSink() { close(); }
  ProbeSink(const ProbeSink&) = delete;
  ProbeSink& operator=(const ProbeSink&) = delete;

  void take(AuthenticatedSocket&& accepted);
  void close();

 private:
  struct Probe {
    Fd socket;
    std::size_t received = 0;
    Timer expiry{};
  };
  using Position = std::list<Probe>::iterator;
  void read(Position probe);
  void end(Position probe);

  EventLoop& loop_;
  std::list<Probe> probes_;
};

}  // namespace bps::transport::tcp
