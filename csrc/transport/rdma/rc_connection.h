// SPDX-License-Identifier: Apache-2.0
// A queue pair with the identifier that the connection manager connects it by.
//
// The states are ours to change (the connection manager knows the numbers, but not the queue pair), so that the
// settings of the user apply and the verbs context is our own. The calling side makes a connection and sends its
// request() on the caller's thread, and establish() on the loop's, from where on bytes move. The called side makes it
// and accepts it on the loop's thread. From the return of break_off() on the device touches no memory for this
// connection.
#pragma once

#include <memory>
#include <string>

#include "transport/rdma/cm.h"
#include "transport/rdma/context.h"
#include "transport/rdma/private_data.h"
#include "transport/rdma/queue_pair.h"

namespace bps::transport::rdma {

class RcConnection {
 public:
  RcConnection(std::shared_ptr<Context> context, CmId id, Plane plane);  // in state INIT: receives can be posted
  RcConnection(RcConnection&&) = default;
  RcConnection& operator=(RcConnection&&) = default;

  // Called side.
  void accept(const ReplyData& reply);
  // Calling side: sends the request. What comes back is an event.
  void request(const RequestData& data);
  // Calling side, after the reply: from now on events come by `channel`, and bytes.
  void establish(rdma_event_channel* channel);
  void break_off();

  explicit operator bool() const { return static_cast<bool>(queue_pair_); }
  rdma_cm_id* id() const { return id_.get(); }
  QueuePair& queue_pair() { return queue_pair_; }
  const QueuePair& queue_pair() const { return queue_pair_; }

  CmChannel caller_channel;  // of the calling side, until establish()

 private:
  void advance(ibv_qp_state state);

  std::shared_ptr<Context> context_;
  Plane plane_;
  CmId id_;
  QueuePair queue_pair_;
};

// Connects to `host`:`port` within the deadline, and returns a connection that only lacks establish(). Throws what
// client_handshake() throws.
RcConnection connect_rc(const std::shared_ptr<Context>& context, const std::string& host, std::uint16_t port,
                        const Nonce& server_nonce, const Hello& hello, const Credentials& credentials,
                        const Deadline& deadline, const std::string& whom);

}  // namespace bps::transport::rdma
