// What the two kinds of RDMA endpoints share: a connection, and how it is lost.
//
// A loss is noted where it is found and told from the transport's poll(), never from within a caller's write(). Before
// it is told the queue pair is gone, so that nothing reads or writes the memory of the loser any more.
#pragma once

#include <string>

#include "transport/rdma/rc_connection.h"
#include "transport/rdma/registrations.h"
#include "transport/transport.h"

namespace bps::transport::rdma {

// Of the transport that the endpoints belong to.
struct TransportState {
  Context& context;
  Registrations& registrations;
  Counters& counters;
  std::uint64_t losses = 0;  // noted so far
  bool losses_due = false;   // some of them are yet to be told
};

class RdmaEndpoint : public Endpoint {
 public:
  RdmaEndpoint(bool data_plane, const Hello& made_by, TransportState& of, RcConnection by)
      : Endpoint(data_plane, made_by), state(of), connection(std::move(by)) {}

  void abandon() override {
    connection.break_off();
    told = true;
    lose("given up");
  }

  // A request of ours is finished, and all before it.
  virtual void on_sent(std::uint64_t number) = 0;
  virtual void on_arrived(const ibv_wc& completion) = 0;
  // Somebody waits for a request to be finished.
  virtual bool awaits_completions() const = 0;
  // After the connection is broken off, from the transport's poll(): what was posted is over, one way or the other.
  virtual void give_up_sends() = 0;
  // After that, or when closed: lets go of all memory.
  virtual void drop() = 0;

  void lose(const std::string& why) {
    if (lost) return;
    lost = true;
    lost_why = why;
    loss = ++state.losses;
    state.losses_due = true;
  }

  TransportState& state;
  RcConnection connection;
  bool closed = false;    // by its user: no callbacks any more
  bool lost = false;      // nothing is accepted any more
  bool finished = false;  // and everything given back
  bool told = false;      // or known to the user, who abandoned it
  std::string lost_why;
  std::uint64_t loss = 0;  // they are told in this order: the first is the likely cause of the others
};

// "remote access error: ...": what a failed completion means, and what to do.
std::string in_words(ibv_wc_status status);

}  // namespace bps::transport::rdma
