// SPDX-License-Identifier: Apache-2.0
// Runs the calling side of a connection. It blocks, with a deadline, on an event channel of its own.
#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "core/hmac.h"
#include "core/interrupt.h"
#include "transport/rdma/rc_connection.h"

namespace bps::transport::rdma {
namespace {

// One question for the peer's hardware address waits this long. The kernel looks into its table of neighbours first and
// listens for changes afterwards, so it can miss an answer that comes at once. It looks again only when its time-out is
// over. So the time-out is short, and the question is repeated until the deadline.
constexpr int kResolve_ms = 200;

struct Attempt {
  const std::string& whom;
  const std::string where;
  const Deadline& deadline;

  [[noreturn]] void fail(const std::string& why, const std::string& hint) const {
    throw HandshakeError(Refusal::kSilent, ErrorCode::kUnreachable,
                         "cannot reach " + whom + " at " + where + ": " + why, hint);
  }
  [[noreturn]] void fail_network(const std::string& why) const {
    fail(why,
         "check that both RDMA interfaces are up and in one network (ip route get, rping); BPS_RDMA_HCA and "
         "BPS_NODE_HOST choose another");
  }

  CmEvent await_any(rdma_event_channel* channel) const {
    for (;;) {
      CmEvent event;
      if (next_event(channel, event)) return event;
      pollfd wait{channel->fd, POLLIN, 0};
      const int ready = poll_until(wait, deadline);
      if (ready == 0) fail_network("no answer in time");
      if (ready < 0) throw_errno("cannot wait for " + whom);
    }
  }

  CmEvent await(rdma_event_channel* channel, rdma_cm_event_type wanted) const {
    CmEvent event = await_any(channel);
    if (event.type == wanted) return event;
    if (event.type == RDMA_CM_EVENT_REJECTED) {
      if (const auto refusal = read_refusal(event.private_data)) {
        throw_refused(refusal->reason, refusal->version, whom);
      }
      fail(in_words(event), "check that the process there runs, and see its log");
    }
    fail_network(in_words(event));
  }

  // Returns an identifier that knows the way to the peer.
  CmId resolve(rdma_event_channel* channel, CmAddress from, CmAddress to, const RdmaOptions& options) const {
    for (;;) {
      CmId id = make_cm_id(channel);
      if (options.traffic_class) {
        auto tos = static_cast<std::uint8_t>(*options.traffic_class);
        ::rdma_set_option(id.get(), RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &tos, sizeof tos);
      }
      if (::rdma_resolve_addr(id.get(), from.get(), to.get(), std::min(kResolve_ms, deadline.left_ms())) != 0) {
        fail_network(std::strerror(errno));
      }
      const CmEvent event = await_any(channel);
      if (event.type == RDMA_CM_EVENT_ADDR_RESOLVED) return id;
      const bool is_late = event.type == RDMA_CM_EVENT_ADDR_ERROR && std::abs(event.status) == ETIMEDOUT;
      if (!is_late || deadline.passed()) fail_network(in_words(event));
    }
  }
};

}  // namespace

RcConnection connect_rc(const std::shared_ptr<Context>& context, const std::string& host, std::uint16_t port,
                        const Nonce& server_nonce, const Hello& hello, const Credentials& credentials,
                        const Deadline& deadline, const std::string& whom) {
  const Rail& rail = context->rail();
  const Attempt attempt{whom, host + " port " + std::to_string(port) + " from " + rail.address, deadline};
  CmChannel channel = make_cm_channel();
  CmId id = attempt.resolve(channel.get(), CmAddress(rail.address, 0, rail.interface),
                            CmAddress(host, port, rail.interface), context->options());
  if (::rdma_resolve_route(id.get(), deadline.left_ms()) != 0) attempt.fail_network(std::strerror(errno));
  attempt.await(channel.get(), RDMA_CM_EVENT_ROUTE_RESOLVED);

  RcConnection connection(context, std::move(id), hello.plane);
  Nonce nonce{};
  random_bytes(nonce);
  const RequestData request = make_request(hello, credentials, nonce, server_nonce);
  connection.request(request);
  const CmEvent answer = attempt.await(channel.get(), RDMA_CM_EVENT_CONNECT_RESPONSE);
  if (!is_proof(answer.private_data, request, credentials, server_nonce)) throw_secret(whom);
  connection.caller_channel = std::move(channel);
  return connection;
}

}  // namespace bps::transport::rdma
