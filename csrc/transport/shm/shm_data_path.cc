// SPDX-License-Identifier: Apache-2.0
// The hot part of shm: descriptors out, descriptors in, and the peer's memory.
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "core/limits.h"
#include "core/log.h"
#include "transport/shm/local_socket.h"
#include "transport/shm/shm_data.h"

namespace bps::transport::shm {
namespace {

// Enough to amortise a poll, small enough that other endpoints of the loop get their turn.
constexpr int kPollBudget = 64;
// A server sums what a descriptor names before the next one is looked at. After so many bytes the loop looks at what
// has come meanwhile: an urgent operation, or the answer to one, should not wait until a whole window is summed.
constexpr std::uint64_t kPollBytes = 256 << 10;
constexpr int kMostAwaited = 1 << 14;  // records that the socket's buffer holds
constexpr auto kWakeDelay = std::chrono::microseconds(15);

}  // namespace

bool ShmData::peer_reaches(const Region& region) const {
  return peer_maps(region) || peer_reaches_plain_;
}

bool ShmData::peer_maps(const Region& region) const {
  return static_cast<const ShmRegion&>(region).piece != nullptr;
}

// The peer must know a region before an entry names it. Its socket holds the record by the time it sees the entry,
// because the record is sent first.
bool ShmData::announce(const Region& region) {
  if (announced_.contains(region.key())) return true;
  const auto& shm = static_cast<const ShmRegion&>(region);
  ShmRecord record{};
  record.key = region.key();
  record.size = region.bytes().size();
  Status status;
  if (shm.piece) {
    record.kind = ShmRecord::kMapped;
    record.base = static_cast<std::uint64_t>(region.bytes().data() - shm.piece->bytes().data());
    record.file_size = shm.piece->bytes().size();
    const int fd = shm.piece->fd();
    status = send_record(socket_.get(), codec::encode(record), {&fd, 1});
  } else {
    record.kind = ShmRecord::kPlain;
    record.base = reinterpret_cast<std::uint64_t>(region.bytes().data());
    status = send_record(socket_.get(), codec::encode(record), {});
  }
  const int error = errno;
  if (status == Status::kOk) announced_.insert(region.key());
  if (status == Status::kPeerLost) lose(why_lost(error));
  if (status == Status::kAgain && is_shortage(error)) note_shortage(error);
  return status == Status::kOk;
}

// The loop looks again every millisecond, for as long as the operation may take.
void ShmData::note_shortage(int error) {
  if (std::exchange(said_short_, true)) return;
  const auto limit = limit_behind(error);
  log_warning("process " + std::to_string(process_.number()) + " cannot be sent memory at the moment (" +
              std::strerror(error) + "), and what needs that waits" +
              (limit ? ": " + limit->what +
                           ", and as many are on their way to processes that have not taken them yet; " + limit->hint
                     : ""));
}

std::string ShmData::why_lost(int error) {
  if (error == EPIPE || error == ECONNRESET) return "connection closed";
  const auto limit = limit_behind(error);
  return limit ? std::string(std::strerror(error)) + ": " + limit->what : std::strerror(error);
}

void ShmData::withdraw(std::uint64_t key) {
  if (announced_.erase(key) == 0 || is_lost()) return;
  ShmRecord record{};
  record.kind = ShmRecord::kWithdrawn;
  record.key = key;
  // A full socket only means that the peer keeps a mapping until it closes: keys are never used twice.
  if (send_record(socket_.get(), codec::encode(record), {}) == Status::kPeerLost) lose(why_lost(errno));
}

const PeerMemory::Region* ShmData::find(const RemoteSpan& span) {
  if (is_lost()) return nullptr;  // we have said that we write no more
  const PeerMemory::Region* region = memory_.find(span.key);
  // The announcement may still be in the socket, behind others; there is room for so many.
  for (int i = 0; i < kMostAwaited && region == nullptr && take_record(); ++i) region = memory_.find(span.key);
  return region == nullptr || !region->has(span) ? nullptr : region;
}

std::byte* ShmData::map(const RemoteSpan& span) {
  const PeerMemory::Region* region = find(span);
  return region == nullptr || region->mapped == nullptr ? nullptr : region->mapped + span.address;
}

Status ShmData::get(const RemoteSpan& span, std::byte* into) {
  const PeerMemory::Region* region = find(span);
  if (region == nullptr) return Status::kProtocol;
  counters_.copies.add();
  counters_.copied_bytes.add(span.length);
  if (region->mapped != nullptr) {
    std::memcpy(into, region->mapped + span.address, span.length);
    return Status::kOk;
  }
  return process_.copy(true, into, region->base + span.address, span.length);
}

Status ShmData::put(const RemoteSpan& span, const std::byte* from) {
  const PeerMemory::Region* region = find(span);
  if (region == nullptr) return Status::kProtocol;
  counters_.copies.add();
  counters_.copied_bytes.add(span.length);
  if (region->mapped != nullptr) {
    std::memcpy(region->mapped + span.address, from, span.length);
    return Status::kOk;
  }
  return process_.copy(false, const_cast<std::byte*>(from), region->base + span.address, span.length);
}

std::size_t ShmData::write(std::span<const WriteOp> ops) {
  if (is_lost() || !out_) return 0;
  std::size_t accepted = 0;
  for (const WriteOp& op : ops) {
    if (out_->room() == 0) break;
    if (!op.fits()) {
      lose(kNoRoom);
      break;
    }
    RemoteSpan part = op.target;
    if (!op.header.empty()) {
      part.length = op.header.size();
      if (put(part, op.header.data()) != Status::kOk) {
        lose("its memory cannot be written");
        break;
      }
      part.address += part.length;
    }
    if (op.length > 0) {
      part.length = op.length;
      if (put(part, op.source->bytes().data() + op.source_offset) != Status::kOk) {
        lose("its memory cannot be written");
        break;
      }
    }
    RingEntry& entry = out_->add();
    entry.kind = EntryKind::kWrite;
    entry.immediate = op.immediate;
    entry.span.length = op.total();
    entry.header_size = 0;
    counters_.data_writes.add();
    counters_.data_bytes.add(op.length);
    if (op.token != kNoToken) written_.push_back(op.token);
    ++accepted;
  }
  if (accepted > 0) publish();
  return accepted;
}

std::size_t ShmData::post(std::span<const Descriptor> descriptors) {
  if (is_lost() || !out_) return 0;
  std::size_t accepted = 0;
  for (const Descriptor& o : descriptors) {
    if (out_->room() == 0) break;
    if (o.length > 0 && !announce(*o.source)) break;
    if (o.answer != nullptr && !announce(*o.answer)) break;
    RingEntry& entry = out_->add();
    entry.kind = EntryKind::kDescriptor;
    entry.span = o.length > 0 ? o.source->remote(o.source_offset, o.length) : RemoteSpan{};
    entry.header_size = static_cast<std::uint32_t>(o.header.size());
    copy_bytes(o.header, entry.header.data());
    counters_.data_writes.add();
    counters_.data_bytes.add(o.length);
    ++accepted;
  }
  if (accepted > 0) publish();
  return accepted;
}

// A peer that sleeps is not woken at once: between two calls of a caller that makes progress itself (progress.h) it
// sleeps for a few microseconds only, and waking its thread costs both processes more than that. It is woken when we
// have nothing left to do, or a moment later.
void ShmData::publish() {
  if (!out_->publish() || ring_due_) return;
  ring_due_ = true;
  ring_due_since_ = Clock::now();
}

void ShmData::ring_if_late() {
  if (!out_->has_sleeper() || out_->is_drained()) {
    ring_due_ = false;
  } else if (Clock::now() - ring_due_since_ >= kWakeDelay) {
    ring();
  }
}

void ShmData::ring() {
  ring_due_ = false;
  if (!out_->claim_sleeper()) return;
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto n = ::write(doorbell_.get(), &one, sizeof one);
}

int ShmData::poll() {
  memory_.drop_retired();
  int found = 0;
  if (!written_.empty()) {  // also of a peer that is lost: nobody reads the source any more
    std::swap(written_, written_now_);
    for (const std::uint64_t token : written_now_) sink->on_written(*this, token);
    found += static_cast<int>(written_now_.size());
    written_now_.clear();
  }
  if (is_lost()) {
    tell_loss();
    return found;
  }
  if (ring_due_) ring_if_late();
  if (!in_) return found;
  RingEntry entry;
  bool broken = false;
  std::uint64_t bytes = 0;
  for (int i = 0; i < kPollBudget && bytes < kPollBytes && !is_lost() && in_->take(entry, broken); ++i, ++found) {
    if (entry.kind == EntryKind::kWrite) {
      sink->on_write(*this, entry.immediate, entry.span.length);
    } else if (entry.kind == EntryKind::kDescriptor && entry.header_size <= kMaxHeader) {
      sink->on_descriptor(*this, {entry.header.data(), entry.header_size}, entry.span);
      bytes += entry.span.length;
    } else {
      broken = true;
      break;
    }
  }
  if (broken) lose("it broke the shared-memory protocol");
  return found;
}

bool ShmData::arm() {
  if (is_lost()) return is_loss_told();
  if (ring_due_) ring();
  return written_.empty() && (!in_ || in_->sleep());
}

void ShmData::disarm() {
  if (in_) in_->awake();
}

}  // namespace bps::transport::shm
