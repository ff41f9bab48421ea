// SPDX-License-Identifier: Apache-2.0
// One process reaches another by these interfaces.
//
// A Transport owns the NIC (or the sockets, or the mappings) and the memory registered with it. It makes endpoints of
// two kinds: control endpoints carry short messages, data endpoints carry payload and nothing else. Bulk data moves in
// one way: write() puts bytes into memory that the peer registered and told us of, and hands the peer a 32-bit
// immediate once they are visible there. Where two processes share a host, a peer can also reach our memory itself:
// DataEndpoint::direct() then gives post(), which names a range to be read in place, and get()/put() on the other side.
//
// Threading: a Transport and its endpoints belong to the thread of its event loop; connect_control() and connect_data()
//            alone may be called from another one, and the endpoint they return enters the loop by attach(). The data
//            path takes no lock.
// Errors:    set-up throws Error. A lost peer is reported once through the sink's on_lost(); see endpoint.h.
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

// A peer that has proved to belong to the job and waits to be accepted. Destroying one rejects it.
class IncomingConnection {
 public:
  explicit IncomingConnection(const Hello& who) : hello(who) {}
  virtual ~IncomingConnection() = default;
  IncomingConnection(const IncomingConnection&) = delete;
  IncomingConnection& operator=(const IncomingConnection&) = delete;

  const Hello hello;
};

// One that came through a Listener.
class IncomingSocket final : public IncomingConnection {
 public:
  explicit IncomingSocket(AuthenticatedSocket by)
      : IncomingConnection(by.hello), socket(std::move(by.socket)), key(by.key) {}
  Fd socket;
  const Digest key;  // of this connection
};

struct ConnectRequest {
  std::span<const std::byte> address;  // what the peer's transport of the same kind published
  Hello hello;                         // its plane is set by the transport
  Deadline deadline;
  std::string whom;            // names the peer in errors
  std::size_t connection = 0;  // of those that the pair of loops has on this plane: decides the rails, see rails_of()

  Hello hello_for(Plane plane) const {
    Hello made = hello;
    made.plane = plane;
    return made;
  }
};

// This says what a transport may do with memory of the caller. A device keeps the pages of registered memory, also when
// the process has given them back and has others at the same address.
enum class CallersMemory : std::uint8_t {
  kInPlace,  // it goes by addresses, or the user answers for it
  kWatched,  // used directly as long as somebody tells when it is given back
  kStaged,
};

class Transport {
 public:
  virtual ~Transport() = default;
  virtual Kind kind() const = 0;
  virtual RegionPtr register_memory(std::span<std::byte> bytes) = 0;
  virtual CallersMemory callers_memory() const { return CallersMemory::kInPlace; }
  // Returns how many connections it takes to use each rail of this process, and of the peer that published `address`.
  virtual std::size_t rail_pairs(std::span<const std::byte> /*address*/) const { return 1; }

  // True when the connections over different rails are paths that may be lost one by one: see control_paths.h.
  virtual bool fails_over() const { return false; }
  // True when the bytes of a write land one after the other, and DataSink::on_cut_off() tells how many have.
  virtual bool lands_in_order() const { return false; }

  // Block until the peer has accepted.
  virtual std::unique_ptr<ControlEndpoint> connect_control(const ConnectRequest& request) = 0;
  virtual std::unique_ptr<DataEndpoint> connect_data(const ConnectRequest& request) = 0;
  // On the loop's thread: the transport owns the endpoint from now on, and tells `sink` what happens on it.
  virtual ControlEndpoint* attach(std::unique_ptr<ControlEndpoint> endpoint, ControlSink& sink) = 0;
  virtual DataEndpoint* attach(std::unique_ptr<DataEndpoint> endpoint, DataSink& sink) = 0;
  // Accept a peer that came to this transport's kind of listener, on the plane that its hello names. They may return
  // before the set-up of the data plane has finished.
  virtual ControlEndpoint* accept_control(std::unique_ptr<IncomingConnection> incoming, ControlSink& sink) = 0;
  virtual DataEndpoint* accept_data(std::unique_ptr<IncomingConnection> incoming, DataSink& sink) = 0;
  virtual void close(Endpoint* endpoint) = 0;  // no callbacks after this

  // Delivers what is there, without blocking; what comes through descriptors arrives by the event loop instead.
  virtual int poll() = 0;
  // Before the loop sleeps: from now on, work wakes the loop. False when work came in meanwhile.
  virtual bool arm() = 0;
  virtual void disarm() = 0;
  // True when poll() alone may miss arrivals, because descriptors announce them.
  virtual bool relies_on_descriptors() const { return false; }
};

}  // namespace bps::transport
