// SPDX-License-Identifier: Apache-2.0
// Defines the interfaces by which one process reaches another.
//
// A Transport owns the NIC (or the sockets, or the mappings) and the memory registered with it. It makes endpoints of
// two kinds: control endpoints carry short messages, data endpoints carry payload and nothing else. Bulk data moves in
// one way: write() puts bytes into memory that the peer registered and told us of, and hands the peer a 32-bit
// immediate once they are visible there. Where two processes share a host, a peer can also reach our memory itself.
// DataEndpoint::direct() then gives post(), which names a range to be read in place, and get() and put() to the peer.
//
// Threading: a Transport and its endpoints belong to the thread of its event loop. Only connect_control() and
// connect_data() may be called from another thread; the endpoint they return enters the loop by attach(). The data path
// takes no lock.
// Errors: set-up throws Error. A lost peer is reported once through the sink's on_lost(); see endpoint.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "core/clock.h"
#include "core/metrics.h"
#include "transport/control_endpoint.h"
#include "transport/data_endpoint.h"
#include "transport/kind.h"

namespace bps::transport {

// Holds a peer that has proved to belong to the job and waits to be accepted. Destroying this rejects the peer.
class IncomingConnection {
 public:
  explicit IncomingConnection(const Hello& who) : hello(who) {}
  virtual ~IncomingConnection() = default;
  IncomingConnection(const IncomingConnection&) = delete;
  IncomingConnection& operator=(const IncomingConnection&) = delete;

  const Hello hello;
};

// Holds one that came through a Listener.
class IncomingSocket final : public IncomingConnection {
 public:
  explicit IncomingSocket(AuthenticatedSocket by)
      : IncomingConnection(by.hello), socket(std::move(by.socket)), key(by.key) {}
  Fd socket;
  const Digest key;  // that of this connection
};

struct ConnectRequest {
  std::span<const std::byte> address;  // what the peer's transport of the same kind published
  Hello hello;                         // its plane is set by the transport
  Deadline deadline;
  std::string whom;            // names the peer in errors
  std::size_t connection = 0;  // its number on this plane of the pair of loops: decides the rails (rails_of())

  Hello hello_for(Plane plane) const {
    Hello made = hello;
    made.plane = plane;
    return made;
  }
};

// Says what a transport may do with memory of the caller. A device keeps the pages of registered memory, even when the
// process has given them back and has others at the same address.
enum class CallersMemory : std::uint8_t {
  kInPlace,  // used directly: the transport goes by addresses, or the user answers for it
  kWatched,  // used directly as long as somebody tells when it is given back
  kStaged,
};

class Transport {
 public:
  virtual ~Transport() = default;
  virtual Kind kind() const = 0;
  virtual RegionPtr register_memory(std::span<std::byte> bytes) = 0;
  virtual CallersMemory callers_memory() const { return CallersMemory::kInPlace; }
  // Returns true when register_foreign() may succeed.
  virtual bool takes_foreign() const { return false; }
  // Registers memory of another device. It needs the descriptor only meanwhile.
  virtual RegionPtr register_foreign(const ForeignMemory& /*memory*/) { return nullptr; }
  // Returns how many connections it takes to use each rail of this process, and of the peer that published `address`.
  virtual std::size_t rail_pairs(std::span<const std::byte> /*address*/) const { return 1; }

  // Returns true when the connections over different rails are paths that may be lost one by one: see control_paths.h.
  virtual bool fails_over() const { return false; }
  // Returns true when the bytes of a write land in order, and DataSink::on_cut_off() tells how many have landed.
  virtual bool lands_in_order() const { return false; }

  // Both block until the peer has accepted.
  virtual std::unique_ptr<ControlEndpoint> connect_control(const ConnectRequest& request) = 0;
  virtual std::unique_ptr<DataEndpoint> connect_data(const ConnectRequest& request) = 0;
  // Must be called on the loop's thread. The transport then owns the endpoint, and tells `sink` what happens on it.
  virtual ControlEndpoint* attach(std::unique_ptr<ControlEndpoint> endpoint, ControlSink& sink) = 0;
  virtual DataEndpoint* attach(std::unique_ptr<DataEndpoint> endpoint, DataSink& sink) = 0;
  // Both accept a peer that came to this transport's kind of listener, on the plane that its hello names. They may
  // return before the set-up of the data plane has finished.
  virtual ControlEndpoint* accept_control(std::unique_ptr<IncomingConnection> incoming, ControlSink& sink) = 0;
  virtual DataEndpoint* accept_data(std::unique_ptr<IncomingConnection> incoming, DataSink& sink) = 0;
  virtual void close(Endpoint* endpoint) = 0;  // no callbacks after this

  // Delivers what is there, without blocking. What comes through descriptors arrives by the event loop instead.
  virtual int poll() = 0;
  // Comes before the loop sleeps: from now on, work wakes the loop. Returns false when work came in meanwhile.
  virtual bool arm() = 0;
  virtual void disarm() = 0;
  // Returns true when poll() alone may miss arrivals, because descriptors announce them.
  virtual bool relies_on_descriptors() const { return false; }
};

}  // namespace bps::transport
