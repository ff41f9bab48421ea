// SPDX-License-Identifier: Apache-2.0
#include "transport/rdma/rdma_data.h"

#include <utility>

namespace bps::transport::rdma {

RdmaData::RdmaData(const Hello& made_by, TransportState& of, RcConnection by)
    : RdmaEndpoint(made_by, of, std::move(by)),
      headers_(std::make_unique<std::array<Header, kDataWindow>>()),
      headers_memory_(of.context.register_own(std::as_writable_bytes(std::span(*headers_)))) {
  longest_piece_ = kLongestPiece;
}

void RdmaData::drop() {
  for (Pending& pending : pending_) {
    if (Registration* source = std::exchange(pending, {}).source) state.registrations.release(source);
  }
  tokens_ = 0;
  wants_room_ = false;
  headers_memory_.reset();
}

}  // namespace bps::transport::rdma
