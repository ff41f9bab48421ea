// SPDX-License-Identifier: Apache-2.0
#include "sim_endpoints.h"

#include <algorithm>
#include <cstring>

namespace bps::sim {

std::size_t SimData::write(std::span<const transport::WriteOp> ops) {
  if (is_lost()) return 0;
  std::size_t room =
      std::min(ops.size(), network_.conditions.window - std::min(network_.conditions.window, outstanding_.size()));
  if (room > 0 && network_.random.chance(network_.conditions.refuse)) {
    room = network_.random.below(room);
    if (direct_ != nullptr) fill_ring();
  }
  if (network_.events.now() < full_until_) room = 0;
  for (const transport::WriteOp& op : ops.first(room)) {
    auto write = std::make_shared<Write>();
    write->op = op;
    copy_bytes(op.header, write->header.data());
    write->bytes.resize(op.header.size() + op.length);
    std::copy_n(write->header.begin(), op.header.size(), write->bytes.begin());
    outstanding_.push_back(write);
    transport_->counters().data_writes.add();
    if (network_.tap != nullptr) {
      network_.tap->on_write(Tap::Moment::kSent, here().machine, there().machine, op.header, op.immediate);
    }
    direct_ != nullptr ? post(write) : depart(write, 0);
  }
  return room;
}

// The other one does not look into the ring for a while.
void SimData::fill_ring() {
  full_until_ = network_.events.now() + network_.random.between({}, std::chrono::milliseconds(20));
  network_.events.at(full_until_, [wire = wire_, side = side_] {
    SimData* end = wire->sides[side].end;
    if (end != nullptr) end->network_.wake(end->here().machine);
  });
}

// Into a ring that both share: it is there at once, also if this process ends now; the other one sees it later, perhaps
// when it has heard of that. Bytes have been put where they belong before.
void SimData::post(const WritePtr& write) {
  if (!write->bytes.empty()) throw Violation("a write of bytes to a process of the same host");
  auto& far = there();
  write->seen = network_.arrival(here().machine, 64);
  if (network_.random.chance(0.1)) write->seen += network_.random.between({}, std::chrono::milliseconds(20));
  if (far.end != nullptr && !far.severed && network_.is_alive(far.machine)) {
    far.end->landed_.push_back(write);
    network_.events.at(write->seen, [wire = wire_, to = 1 - side_] {
      auto& side = wire->sides[to];
      if (side.end != nullptr) side.end->network_.wake(side.machine);
    });
  }
  end(write);
}

// The source is read now, or when the machine has sent what it had to send before; the last piece later than the first.
void SimData::depart(const WritePtr& write, std::size_t piece) {
  const std::uint64_t length = write->op.length;
  const std::uint64_t from = length * piece / kPieces;
  const std::uint64_t to = length * (piece + 1) / kPieces;
  const Time lands = network_.arrival(here().machine, 64 + to - from);
  const Time reads = lands - network_.conditions.delay - network_.conditions.jitter;
  network_.events.at(reads, [wire = wire_, side = side_, write, piece, from, to, lands] {
    SimData* end = wire->sides[side].end;
    if (end == nullptr || wire->sides[side].severed || !end->network_.is_alive(wire->sides[side].machine)) return;
    if (to > from) {
      std::memcpy(write->bytes.data() + write->op.header.size() + from,
                  write->op.source->bytes().data() + write->op.source_offset + from, to - from);
    }
    end->network_.deliver(
        wire->sides[side].machine, wire->sides[1 - side].machine, lands,
        [wire, side, write, piece] {
          auto& far = wire->sides[1 - side];
          if (far.end == nullptr || far.severed || !far.end->network_.is_alive(far.machine)) return;
          if (far.end->network_.conditions.by_process || far.end->transport_ == nullptr) {  // or not accepted yet
            far.end->pieces_.emplace_back(write, piece);
            far.end->network_.wake(far.machine);
          } else {
            far.end->land(write, piece);
          }
        },
        [wire, side] { give_up(*wire, side); });
    if (piece + 1 < kPieces) end->depart(write, piece + 1);
  });
}

bool SimData::may_land(Write& write) {
  if (write.bytes.empty()) return true;
  if (write.is_refused) return false;
  const transport::RemoteSpan where{write.op.target.key, write.op.target.address, write.bytes.size()};
  const transport::RegionPtr region = transport_->region(where.key);
  if (region != nullptr &&
      (where.address > region->bytes().size() || where.length > region->bytes().size() - where.address)) {
    throw Violation("a write goes beyond its region");
  }
  if (network_.conditions.by_process) {
    if (region != nullptr && write.landed == 0) write.unit = sink->allows_write(*this, where, write.op.immediate);
    write.is_refused = region == nullptr || write.unit == 0;
    if (write.is_refused) transport_->counters().stale.add();
    return !write.is_refused;
  }
  if (region != nullptr) return true;
  there().severed = true;  // the NIC refuses it, which ends the connection
  if (there().end != nullptr) there().end->break_off("remote access error");
  break_off("a peer wrote to memory that is not registered");
  return false;
}

// Where a piece begins: pieces are whole units.
std::size_t SimData::edge(const Write& write, std::size_t piece) {
  const std::size_t unit = std::max<std::size_t>(write.unit, 1);
  return piece == kPieces ? write.bytes.size() : write.bytes.size() * piece / kPieces / unit * unit;
}

void SimData::land(const WritePtr& write, std::size_t piece) {
  const std::size_t size = write->bytes.size();
  if (may_land(*write)) {
    const std::size_t from = edge(*write, piece);
    const std::size_t to = edge(*write, piece + 1);
    if (to > from) {
      const transport::RegionPtr region = transport_->region(write->op.target.key);
      std::memcpy(region->bytes().data() + write->op.target.address + from, write->bytes.data() + from, to - from);
    }
  }
  std::erase(landing_, write);
  if (++write->landed < kPieces) {
    if (network_.conditions.by_process && !write->is_refused) landing_.push_back(write);
    return;
  }
  network_.trace.note("landed", here().machine, write->op.immediate, size);
  if (!write->is_refused && !is_lost()) {
    landed_.push_back(write);
    network_.wake(here().machine);
  } else if (network_.conditions.by_process && !write->is_refused && size > 0) {
    // All of it has come, and its end is not told any more.
    if (network_.tap != nullptr && write->op.header.empty()) {
      network_.tap->on_write(Tap::Moment::kTaken, there().machine, here().machine, {}, write->op.immediate);
    }
    sink->on_cut_off(*this, write->op.immediate, size);
  }
  // The acknowledgement goes back.
  network_.deliver(
      here().machine, there().machine, network_.arrival(here().machine, 0),
      [wire = wire_, to = 1 - side_, write] {
        if (wire->sides[to].end != nullptr) wire->sides[to].end->end(write);
      },
      [wire = wire_, to = 1 - side_] { give_up(*wire, to); });
}

std::uint64_t SimData::stop_landing(std::uint32_t immediate) {
  const auto found =
      std::ranges::find_if(landing_, [&](const WritePtr& one) { return one->op.immediate == immediate; });
  if (found == landing_.end()) return 0;
  const WritePtr write = *found;
  landing_.erase(found);
  write->is_refused = true;
  return edge(*write, write->landed);
}

void SimData::end(const WritePtr& write) {
  if (std::exchange(write->is_over, true)) return;
  std::erase(outstanding_, write);
  if (write->op.token != transport::kNoToken) tokens_.push_back(write->op.token);
  network_.wake(here().machine);
}

// Nothing is read any more: all tokens come back.
void SimData::on_severed() {
  for (const WritePtr& write : std::exchange(landing_, {})) {
    if (!write->bytes.empty()) sink->on_cut_off(*this, write->op.immediate, edge(*write, write->landed));
  }
  for (const WritePtr& write : std::vector(outstanding_)) end(write);
}

int SimData::poll() {
  int found = 0;
  // Those of a connection that is lost are told all the same.
  while (!tokens_.empty()) {
    const std::uint64_t token = tokens_.front();
    tokens_.pop_front();
    sink->on_written(*this, token);
    ++found;
  }
  // In order: a piece that comes before its time waits.
  for (bool any = true; std::exchange(any, false) && !here().severed;) {
    for (std::size_t i = 0; i < pieces_.size() && !here().severed; ++i) {
      const auto [write, piece] = pieces_[i];
      if (piece != write->landed) continue;
      pieces_.erase(pieces_.begin() + static_cast<std::ptrdiff_t>(i--));
      land(write, piece);
      any = true;
      ++found;
    }
  }
  while (!posted_.empty() && !is_loss_told() && !here().severed) {
    const Posted posted = std::move(posted_.front());
    posted_.pop_front();
    network_.trace.note("posting", here().machine, there().machine, posted.span.length);
    sink->on_posting(*this, posted.header, posted.span);
    ++found;
  }
  while (!landed_.empty() && !is_loss_told() && !here().severed) {
    const WritePtr write = landed_.front();
    if (write->seen > network_.events.now()) break;
    landed_.pop_front();
    if (network_.tap != nullptr) {
      const auto header = std::span(write->bytes).first(write->op.header.size());
      network_.tap->on_write(Tap::Moment::kTaken, there().machine, here().machine, header, write->op.immediate);
    }
    sink->on_write(*this, write->op.immediate, write->bytes.size());
    ++found;
  }
  return found + (tell() ? 1 : 0);
}

}  // namespace bps::sim
