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

Carried RdmaData::take_carried() {
  is_watched_ = true;
  if (is_lost() || carried_bytes_ == 0) return {};  // the time counts when the bytes do
  if (awaited_ > 0) {
    const std::uint64_t now = now_ns();
    busy_ns_ += now - std::exchange(busy_since_ns_, now);
  }
  return {std::exchange(carried_bytes_, 0), std::exchange(busy_ns_, 0) / 1000};
}

void RdmaData::drop() {
  for (Pending& pending : pending_) {
    if (Registration* source = std::exchange(pending, {}).source) state.registrations.release(source);
  }
  awaited_ = 0;
  wants_room_ = false;
  headers_memory_.reset();
}

}  // namespace bps::transport::rdma
