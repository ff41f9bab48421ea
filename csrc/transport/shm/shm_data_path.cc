// SPDX-License-Identifier: Apache-2.0
// Contains the hot part of shm: postings out, postings in, and the peer's memory.
#include <cerrno>
#include <cstring>

#include "core/limits.h"
#include "transport/shm/shm_data.h"

namespace bps::transport::shm {
namespace {

// This is enough to make a poll worth its cost, and small enough that other endpoints of the loop get their turn.
constexpr int kPollBudget = 64;
// A server sums what a posting names before it looks at the next one. After this many bytes the loop looks at what has
// come meanwhile: an urgent operation, or the answer to one, should not wait until a whole window is summed.
constexpr std::uint64_t kPollBytes = 256 << 10;
constexpr int kMostAwaited = 1 << 14;  // records that the socket's buffer holds

}  // namespace

bool ShmData::peer_reaches(const Region& region) const {
  return peer_maps(region) || peer_reaches_plain_;
}

bool ShmData::peer_maps(const Region& region) const {
  return static_cast<const ShmRegion&>(region).piece != nullptr;
}

bool ShmData::announce(const Region& region) {
  const Status status = announcements_.announce(region);
  if (status == Status::kPeerLost) lose(why_lost(errno));
  return status == Status::kOk;
}

std::string ShmData::why_lost(int error) {
  if (error == EPIPE || error == ECONNRESET) return "connection closed";
  const auto limit = limit_behind(error);
  return limit ? std::string(std::strerror(error)) + ": " + limit->what : std::strerror(error);
}

void ShmData::withdraw(std::uint64_t key) {
  if (!is_lost() && announcements_.withdraw(key) == Status::kPeerLost) lose(why_lost(errno));
}

const PeerMemory::Region* ShmData::find(const RemoteSpan& span) {
  if (is_lost()) return nullptr;  // we have said that we write no more
  const PeerMemory::Region* region = memory_.find(span.key);
  // The announcement may still be in the socket, behind at most this many others.
  for (int i = 0; i < kMostAwaited && region == nullptr && take_record(); ++i) region = memory_.find(span.key);
  return region == nullptr || !region->has(span) ? nullptr : region;
}

std::byte* ShmData::map(const RemoteSpan& span) {
  const PeerMemory::Region* region = find(span);
  return region == nullptr || region->mapped == nullptr ? nullptr : region->mapped + span.address;
}

Status ShmData::copy(const RemoteSpan& span, std::byte* here, bool reads) {
  const PeerMemory::Region* region = find(span);
  if (region == nullptr) return Status::kProtocol;
  counters_.copies.add();
  counters_.copied_bytes.add(span.length);
  if (region->mapped == nullptr) return process_.copy(reads, here, region->base + span.address, span.length);
  std::byte* const there = region->mapped + span.address;
  std::memcpy(reads ? here : there, reads ? there : here, span.length);
  return Status::kOk;
}

Status ShmData::get(const RemoteSpan& span, std::byte* into) {
  return copy(span, into, true);
}

Status ShmData::put(const RemoteSpan& span, const std::byte* from) {
  return copy(span, const_cast<std::byte*>(from), false);
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
    written_.add(op.token);
    ++accepted;
  }
  if (accepted > 0) out_->publish();
  return accepted;
}

std::size_t ShmData::post(std::span<const Posting> postings) {
  if (is_lost() || !out_) return 0;
  std::size_t accepted = 0;
  for (const Posting& o : postings) {
    if (out_->room() == 0) break;
    if (o.length > 0 && !announce(*o.source)) break;
    if (o.answer != nullptr && !announce(*o.answer)) break;
    RingEntry& entry = out_->add();
    entry.kind = EntryKind::kPosting;
    entry.span = o.length > 0 ? o.source->remote(o.source_offset, o.length) : RemoteSpan{};
    entry.header_size = static_cast<std::uint32_t>(o.header.size());
    copy_bytes(o.header, entry.header.data());
    counters_.data_writes.add();
    counters_.data_bytes.add(o.length);
    ++accepted;
  }
  if (accepted > 0) out_->publish();
  return accepted;
}

int ShmData::poll() {
  memory_.drop_retired();
  int found = written_.tell(*this);  // also for a peer that is lost: nobody reads the source any more
  if (is_lost()) {
    tell_loss();
    return found;
  }
  if (!in_) return found;
  if (out_->is_due()) out_->ring_if_late();
  RingEntry entry;
  bool broken = false;
  std::uint64_t bytes = 0;
  for (int i = 0; i < kPollBudget && bytes < kPollBytes && !is_lost() && in_->take(entry, broken); ++i, ++found) {
    if (entry.kind == EntryKind::kWrite) {
      sink->on_write(*this, entry.immediate, entry.span.length);
    } else if (entry.kind == EntryKind::kPosting && entry.header_size <= kMaxHeader) {
      sink->on_posting(*this, {entry.header.data(), entry.header_size}, entry.span);
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
  if (out_ && out_->is_due()) out_->ring();
  return written_.empty() && (!in_ || in_->sleep());
}

void ShmData::disarm() {
  if (in_) in_->awake();
}

}  // namespace bps::transport::shm
