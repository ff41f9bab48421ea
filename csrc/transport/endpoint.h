// SPDX-License-Identifier: Apache-2.0
// Describes one end of a connection to a peer, on one plane, by what the two kinds of endpoint share: whom they lead
// to, and how a peer is lost. Belongs to the thread of the event loop.
//
// Loss is one state machine for all transports. A loss is noted where it is found, possibly deep inside a caller's
// write(); from then on the endpoint accepts nothing. The sink is told later and only once, from the transport's poll()
// or from the event loop. The connection is severed before that, so that no byte of the peer lands in our memory
// afterwards.
//
//   alive --lose(why)--> noted --tell_loss()--> severed and told
//     \------------------abandon()------------> severed and told, without a call of the sink
#pragma once

#include <string>
#include <utility>

#include "transport/handshake.h"
#include "transport/rails.h"

namespace bps::transport {

class Endpoint {
 public:
  virtual ~Endpoint() = default;
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  // Gives the peer up, even if it is alive. After the return nothing of the peer lands in our memory, nothing is sent,
  // and nothing is reported except the tokens of writes that were posted. May be called from any callback. (A peer on
  // the same host that has our memory mapped cannot be kept from writing to it.)
  void abandon() {
    lose("given up");
    told_ = true;
    sever();
  }
  bool is_lost() const { return lost_; }
  // Returns true when the network does not seem to carry what is sent: the peer's host acknowledges nothing, although
  // bytes were repeated. A peer that is stopped is not silent. Not for the data path: it asks the system.
  virtual bool is_silent() const { return false; }
  // Returns true when the peer or its system has all that was sent, so that closing the connection loses nothing. Is
  // also true of a lost peer. Not for the data path: it asks the system.
  virtual bool is_flushed() const { return true; }

  const bool is_data_plane;
  Rails rails;        // set by the transport
  const Hello hello;  // who opened this connection, and which loops it connects

 protected:
  Endpoint(bool data_plane, const Hello& opened_by) : is_data_plane(data_plane), hello(opened_by) {}

  // Notes that the peer is lost. The first reason counts.
  void lose(std::string why) {
    if (lost_) return;
    lost_ = true;
    why_lost_ = std::move(why);
    on_loss_noted();
  }
  bool is_loss_untold() const { return lost_ && !told_; }
  bool is_loss_told() const { return told_; }
  // Tells the sink about a loss that was noted. `detail` is added to the reason.
  void tell_loss(const std::string& detail = "") {
    if (!is_loss_untold()) return;
    told_ = true;
    sever();
    report_loss(why_lost_ + detail);
  }

  // Stops all traffic with the peer, in both directions. May be called more than once.
  virtual void sever() = 0;
  virtual void report_loss(const std::string& why) = 0;  // calls the sink
  virtual void on_loss_noted() {}

 private:
  bool lost_ = false;
  bool told_ = false;
  std::string why_lost_;
};

}  // namespace bps::transport
