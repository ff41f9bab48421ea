// SPDX-License-Identifier: Apache-2.0
#include "worker/relay_sender.h"

#include "worker/admission.h"

namespace bps::worker {
namespace {

// A rank of this host may have declared something else than this one. The server tells them then.
bool is_of(const tensor::PushHeader& header, const Tensor& tensor) {
  const tensor::Partitioning& cut = tensor.cut(header.kind);
  return header.dtype == tensor.dtype && header.partition < cut.count() &&
         header.length == cut.piece(header.partition).length;
}

}  // namespace

void RelaySender::contribute(std::uint32_t number, const tensor::PushHeader& header, std::int32_t priority,
                             std::uint32_t place) {
  const auto fail = [&](const Error& why) { contributions_.source()->fail(number, why, {}); };
  ServerConnection* server = connections_.find_connected(place);
  if (server == nullptr) {
    return fail(Error(ErrorCode::kTransport, "this rank does not speak to that server for its host",
                      "install the same bps_rdma version everywhere and use the same settings on all ranks"));
  }
  if (server->loss.is_known()) return fail(connections_.failure_of(*server));
  HostContribution& transfer = contributions_.make(number, header, priority, *server);
  if (!compressed_.empty()) {
    const auto found = compressed_.find({header.group, header.tensor});
    if (found != compressed_.end() && found->second->compressor->applies(header.kind, header.op) &&
        compresses_to(*server, *found->second) && is_of(header, *found->second)) {
      transfer.compress(found->second);
    }
  }
  enqueue(transfer, *server, connections_, counters_);
}

void RelaySender::cancel(std::uint32_t number, const Error& why) {
  HostContribution* contribution = contributions_.find(number);
  if (contribution != nullptr) cancellation_.abort(*contribution, *contribution->server, why);
}

void RelaySender::note_landed(std::uint32_t number) {
  const HostContribution* contribution = contributions_.find(number);
  if (contribution == nullptr || contribution->server->is_closed()) return;
  contribution->server->untold.push_back(contribution->immediate());
  connections_.note_landed();
}

void RelaySender::refuse(const tensor::PushHeader& header, std::uint32_t place, const Error& why) {
  ServerConnection* server = connections_.find_connected(place);
  if (server == nullptr || server->loss.is_known()) return;
  HostContribution& nobodys = contributions_.make(HostContributions::kNobody, header, 0, *server);
  cancellation_.abort(nobodys, *server, why);
}

}  // namespace bps::worker
