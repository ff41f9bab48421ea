// SPDX-License-Identifier: Apache-2.0
// Two processes of one host, each of which reaches the memory that the other one has registered: at once, whether its
// owner runs or not, and until the one who writes has given the connection up or its process has ended.
#include <cstring>

#include "sim_endpoints.h"
#include "transport/shm/shared_memory.h"

namespace bps::sim {
namespace {

bool is_mapped(const Conditions& conditions, std::span<const std::byte> bytes) {
  return conditions.maps_all || transport::shm::SharedMemory::find(bytes) != nullptr;
}

}  // namespace

bool SimData::peer_maps(const transport::Region& region) const {
  return is_mapped(network_.conditions, region.bytes());
}

std::size_t SimData::post(std::span<const transport::Posting> postings) {
  if (is_lost()) return 0;
  std::size_t room = postings.size();
  if (network_.random.chance(network_.conditions.refuse)) room = network_.random.below(room + 1);
  for (const transport::Posting& what : postings.first(room)) {
    Posted posted{.header = {what.header.begin(), what.header.end()}, .span = {}};
    if (what.length > 0) posted.span = what.source->remote(what.source_offset, what.length);
    transport_->counters().data_writes.add();
    network_.deliver(
        here().machine, there().machine, network_.arrival(here().machine, 64),
        [wire = wire_, to = 1 - side_, posted] {
          auto& far = wire->sides[to];
          if (far.end == nullptr || far.severed) return;
          far.end->posted_.push_back(posted);
          far.end->network_.wake(far.machine);
        },
        [wire = wire_, from = side_] { give_up(*wire, from); });
  }
  return room;
}

// Nothing once this end has given up: it has said that it writes no more. What has been withdrawn is not found.
std::byte* SimData::find(const transport::RemoteSpan& span, bool only_mapped) {
  const SimData* far = there().end;
  if (is_lost() || far == nullptr || far->transport_ == nullptr) return nullptr;
  const transport::RegionPtr region = far->transport_->region(span.key);
  if (region == nullptr || span.address > region->bytes().size() ||
      span.length > region->bytes().size() - span.address) {
    return nullptr;
  }
  if (only_mapped && !is_mapped(network_.conditions, region->bytes())) return nullptr;
  return region->bytes().data() + span.address;
}

std::byte* SimData::map(const transport::RemoteSpan& span) {
  return find(span, true);
}

Status SimData::get(const transport::RemoteSpan& span, std::byte* into) {
  const std::byte* from = find(span, false);
  if (from == nullptr) return Status::kProtocol;
  std::memcpy(into, from, span.length);
  return Status::kOk;
}

Status SimData::put(const transport::RemoteSpan& span, const std::byte* from) {
  std::byte* to = find(span, false);
  if (to == nullptr) return Status::kProtocol;
  std::memcpy(to, from, span.length);
  return Status::kOk;
}

bool SimData::is_fenced() {
  const auto& far = there();
  if (far.end != nullptr && far.end->transport_ == nullptr) return true;  // it has not accepted, and mapped nothing
  return far.machine == here().machine || far.end == nullptr || far.severed || !network_.is_alive(far.machine);
}

void SimData::take_rest() {
  for (const WritePtr& write : std::exchange(landed_, {}))
    sink->on_write(*this, write->op.immediate, write->bytes.size());
}

std::shared_ptr<transport::shm::SharedMemory> SimData::hold(const transport::RemoteSpan& span) {
  const std::byte* bytes = find(span, true);
  return bytes == nullptr ? nullptr : transport::shm::SharedMemory::find({bytes, span.length});
}

bool SimData::can_fence() const {
  return network_.conditions.may_fence || wire_->sides[0].machine == wire_->sides[1].machine;
}

void SimData::fence() {
  if (!is_fenced() && can_fence()) network_.fence(there().machine);
}

}  // namespace bps::sim
