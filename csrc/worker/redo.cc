// SPDX-License-Identifier: Apache-2.0
#include "worker/redo.h"

#include <cstring>

#include "worker/server_connection.h"

namespace bps::worker {

Landed redo(const InFlight& entry) {
  const Transfer& transfer = *entry.transfer;
  const tensor::Extent extent = transfer.extent_of(entry.part);
  const bool has_ended = entry.server->is_closed() && !entry.server->needs_fence();
  if (!(has_ended || entry.end != InFlight::End::kOpen) || !entry.was_sent() || !extent.wants_data()) return {};
  if (entry.staged == nullptr && is_copied_by_device(transfer.route)) return {};  // the buffer was given up
  const auto last = entry.server->log.log().last_of(trace_key(transfer, entry.part), extent.length);
  if (!last) return {};
  std::byte* to = entry.staged != nullptr ? entry.staged->bytes() : transfer.output_bytes + extent.output_offset;
  std::memcpy(to + last->at, last->block.data(), last->block.size());
  if (entry.staged == nullptr) return {nullptr, last->end()};
  return {last->end() == extent.length ? entry.staged->memory : nullptr, 0};
}

}  // namespace bps::worker
