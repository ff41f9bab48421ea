// SPDX-License-Identifier: Apache-2.0
// Has a listening identifier per rail, and keeps the callers that it lets in.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/rdma/cm.h"
#include "transport/rdma/private_data.h"
#include "transport/rdma/rdma.h"

namespace bps::transport::rdma {

// Holds a caller whose request has been checked, and not yet answered.
class RdmaIncoming final : public IncomingConnection {
 public:
  RdmaIncoming(std::shared_ptr<rdma_event_channel> at, std::size_t by_rail, CmId by, const Hello& who,
               const ReplyData& answer)
      : IncomingConnection(who), channel(std::move(at)), rail(by_rail), id(std::move(by)), reply(answer) {}
  const std::shared_ptr<rdma_event_channel> channel;  // the listener may close while connections still wait
  const std::size_t rail;
  CmId id;
  const ReplyData reply;
};

}  // namespace bps::transport::rdma
