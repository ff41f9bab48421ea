// SPDX-License-Identifier: Apache-2.0
// Gives both kinds of RDMA endpoint their connection, and one way to lose it.
//
// The transport works with RcEndpoint, whichever the plane; RdmaEndpoint joins it to the plane's interface. A loss is
// told only after the queue pair is gone, so that nothing reads or writes the user's memory any more. Endpoints belong
// to the thread of the loop.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "transport/rdma/acknowledgements.h"
#include "transport/rdma/rc_connection.h"
#include "transport/rdma/registrations.h"
#include "transport/transport.h"

namespace bps::transport::rdma {

class RcEndpoint;

// Holds the parts of the transport that the endpoints use.
struct TransportState {
  Context& context;
  Registrations& registrations;
  Counters& counters;
  const std::uint8_t rail;   // its number in this process
  std::uint64_t losses = 0;  // how many have been noted so far
  bool losses_due = false;   // some of them are yet to be told
  bool port_down = false;
  std::vector<RcEndpoint*> in_turn{};  // those whose begin_turn() the next poll() calls
};

class RcEndpoint {
 public:
  RcEndpoint(TransportState& of, RcConnection by) : state(of), connection(std::move(by)) {}
  virtual ~RcEndpoint() = default;

  // Is called when request `number` of ours is finished, and all before it.
  virtual void on_sent(std::uint64_t number) = 0;
  virtual void on_arrived(const ibv_wc& completion) = 0;
  // Begins a turn of the loop. Returns how many messages of earlier turns it has handled, and still holds.
  virtual int begin_turn() { return 0; }
  // Returns true when messages have arrived and wait for a later turn. A loss is told after them.
  virtual bool holds_messages() const { return false; }
  // Returns true when somebody waits for a request to be finished.
  virtual bool awaits_completions() const = 0;
  // See EndpointTable::look_for_silence().
  virtual void look() = 0;

  // Is called by poll() after the connection is broken off: what was posted is over, one way or the other.
  virtual void give_up_sends() = 0;
  // Is called after that, or when the endpoint is closed. Releases all memory.
  virtual void drop() = 0;

  // These are about the loss of the peer; see endpoint.h.
  virtual void lose(const std::string& why) = 0;
  virtual void tell_loss(const std::string& detail) = 0;
  virtual bool is_lost() const = 0;
  virtual bool is_loss_told() const = 0;
  virtual const Endpoint* endpoint() const = 0;

  TransportState& state;
  RcConnection connection;
  bool closed = false;    // by its user: nothing is called any more
  bool finished = false;  // lost, and all memory given back
  Acknowledgements acknowledgements;
  std::uint64_t loss = 0;  // its number: losses are told in this order, as the first is the likely cause of the others
};

template <typename Plane>
class RdmaEndpoint : public Plane, public RcEndpoint {
 public:
  RdmaEndpoint(const Hello& opened_by, TransportState& of, RcConnection by)
      : Plane(opened_by), RcEndpoint(of, std::move(by)) {
    this->rails.here = of.rail;
  }

  void lose(const std::string& why) final { Plane::lose(why); }
  void tell_loss(const std::string& detail) final { Plane::tell_loss(detail); }
  bool is_lost() const final { return Plane::is_lost(); }
  bool is_loss_told() const final { return Plane::is_loss_told(); }
  const Endpoint* endpoint() const final { return this; }

 private:
  void sever() final { connection.break_off(); }
  void on_loss_noted() final {
    loss = ++state.losses;
    state.losses_due = true;
  }
};

// Says what a failed completion means, and what to do: "remote access error: ...".
std::string in_words(ibv_wc_status status);

}  // namespace bps::transport::rdma
