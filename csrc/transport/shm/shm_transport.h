// SPDX-License-Identifier: Apache-2.0
// Connects processes of one host: control messages go over a Unix socket, data as postings in shared rings.
//
// A data endpoint is a ring of postings in each direction, and the knowledge of the peer's regions. The peer maps
// regions in SharedMemory on first use. It reads and writes other regions by cross-memory copies (process_vm_readv)
// where the kernel allows it, which a probe at set-up finds out. The endpoint's Unix socket carries the announcements
// of regions and shows when the peer is gone. Before a lost peer's mappings of our memory may be forgotten it must be
// fenced: it has closed its socket, or it is ended through a pidfd that was opened at set-up.
//
// The transport belongs to the thread of the loop, except connect_control() and connect_data().
#pragma once

#include <memory>
#include <vector>

#include "core/event_loop.h"
#include "transport/shm/options.h"
#include "transport/shm/posting_ring.h"
#include "transport/shm/shared_memory.h"
#include "transport/socket_control.h"
#include "transport/transport.h"

namespace bps::transport::shm {

class ShmData;

class ShmTransport final : public Transport {
 public:
  ShmTransport(EventLoop& loop, const Credentials& credentials, Counters& counters, const ShmOptions& options);
  ~ShmTransport() override;

  Kind kind() const override { return Kind::kShm; }
  RegionPtr register_memory(std::span<std::byte> bytes) override;
  std::unique_ptr<ControlEndpoint> connect_control(const ConnectRequest& request) override;
  std::unique_ptr<DataEndpoint> connect_data(const ConnectRequest& request) override;
  ControlEndpoint* attach(std::unique_ptr<ControlEndpoint> endpoint, ControlSink& sink) override;
  DataEndpoint* attach(std::unique_ptr<DataEndpoint> endpoint, DataSink& sink) override;
  ControlEndpoint* accept_control(std::unique_ptr<IncomingConnection> incoming, ControlSink& sink) override;
  DataEndpoint* accept_data(std::unique_ptr<IncomingConnection> incoming, DataSink& sink) override;
  void close(Endpoint* endpoint) override;
  int poll() override;
  bool arm() override;
  void disarm() override;

 private:
  Fd open_socket(const ConnectRequest& request, Plane plane) const;
  void withdraw(std::uint64_t key);

  EventLoop& loop_;
  const Credentials& credentials_;
  Counters& counters_;
  const ShmOptions options_;
  std::uint64_t next_key_ = 1;
  std::vector<std::unique_ptr<SocketControl>> controls_;
  std::vector<std::unique_ptr<ShmData>> datas_;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  // regions may outlive the transport
};

}  // namespace bps::transport::shm
