// SPDX-License-Identifier: Apache-2.0
// Shows RDMA to the rest of the program, in builds with and without it. It includes no header of verbs.
//
// A transport works on all rails of the process. The connection manager (librdmacm) makes connections: RdmaTransport
// calls, and RdmaListener lets callers in. Each connection is a reliable queue pair. A pair of loops has one for
// control messages and several for data.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/event_loop.h"
#include "core/port_range.h"
#include "transport/rdma/rail.h"
#include "transport/transport.h"

namespace bps::transport::rdma {

// Lists the rails of this machine under its settings, or says why there are none and what to do about it.
struct RdmaRails {
  std::vector<Rail> rails;
  std::string why_not;
  std::string hint;
  bool usable() const { return !rails.empty(); }
};
// Finds them; `wish.index` is taken from the options.
RdmaRails find_rdma(const RdmaOptions& options, GidWish wish);

class RailError final : public Error {
 public:
  RailError(std::size_t number, const Error& why) : Error(why), rail(number) {}
  const std::size_t rail;
};
// Throws RailError for the first rail that cannot be opened.
std::unique_ptr<Transport> make_rdma_transport(EventLoop& loop, const Credentials& credentials, Counters& counters,
                                               const std::vector<Rail>& rails, const RdmaOptions& options);

// Listens on every rail, at ports of that range. `enter` gets callers who prove that they belong to the job, on the
// loop's thread; the transport that was made for the same rails accepts them. The others are refused and counted.
class RdmaListener {
 public:
  using Enter = std::function<void(std::unique_ptr<IncomingConnection>)>;
  virtual ~RdmaListener() = default;
  // Returns what callers need: this listener's nonce, and the address, port and speed of each rail.
  virtual Bytes address() const = 0;
  virtual std::uint64_t refused() const = 0;  // may be called from any thread
};
std::unique_ptr<RdmaListener> open_rdma_listener(EventLoop& loop, const Credentials& credentials,
                                                 const std::vector<Rail>& rails, const PortRange& ports,
                                                 RdmaListener::Enter enter);

// ---- For `bps doctor`

struct RdmaPort {
  unsigned number = 1;
  bool active = false;
  std::string state;       // "PORT_ACTIVE"
  std::string link_layer;  // "Ethernet", "InfiniBand"
  unsigned mtu = 0;
  std::uint32_t speed = 0;  // in Mbit/s
  std::uint64_t largest_message = 0;
  std::vector<GidEntry> gids;
};
struct RdmaDevice {
  std::string name;
  std::string firmware;
  std::uint32_t max_qp = 0;
  std::uint32_t max_cqe = 0;
  std::uint32_t max_srq_wr = 0;
  int numa_node = -1;
  std::vector<RdmaPort> ports;
};
struct RdmaReport {
  bool built_in = false;
  bool libraries = false;
  std::string verbs_library;
  std::string cm_library;
  std::string why_not;
  std::string hint;
  std::vector<RdmaDevice> devices;
};
RdmaReport rdma_report();

}  // namespace bps::transport::rdma
