// SPDX-License-Identifier: Apache-2.0
// Connects a queue pair, by an identifier of the connection manager.
//
// This class changes the states of the queue pair. (The connection manager knows its number, but not the queue pair.)
// So the settings of the user apply, and the verbs context is our own. The calling side makes a connection and sends
// its request() on the caller's thread, and calls establish() on the loop's, from where on bytes move. The called side
// makes and accepts it on the loop's thread. After the return of break_off() the device touches no memory for this
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
  RcConnection(std::shared_ptr<Context> context, CmId id, Plane plane);  // its state is INIT: receives can be posted
  RcConnection(RcConnection&&) = default;
  RcConnection& operator=(RcConnection&&) = default;

  // The called side accepts by this.
  void accept(const ReplyData& reply);
  // The calling side sends the request by this. The answer comes as an event.
  void request(const RequestData& data);
  // The calling side does this after the reply. From now on events come by `channel`, and bytes move.
  void establish(rdma_event_channel* channel);
  void break_off();

  explicit operator bool() const { return static_cast<bool>(queue_pair_); }
  rdma_cm_id* id() const { return id_.get(); }
  QueuePair& queue_pair() { return queue_pair_; }
  const QueuePair& queue_pair() const { return queue_pair_; }

  CmChannel caller_channel;  // that of the calling side until establish(); else null

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
