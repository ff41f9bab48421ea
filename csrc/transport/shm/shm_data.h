// SPDX-License-Identifier: Apache-2.0
// Implements the data endpoint of shm. Set-up is in shm_transport.cc, the hot part in shm_data_path.cc.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/event_loop.h"
#include "core/turn_budget.h"
#include "transport/shm/announcements.h"
#include "transport/shm/local_socket.h"
#include "transport/shm/options.h"
#include "transport/shm/peer_memory.h"
#include "transport/shm/peer_process.h"
#include "transport/shm/posting_ring.h"
#include "transport/shm/record.h"
#include "transport/shm/ring_out.h"
#include "transport/shm/shared_memory.h"
#include "transport/transport.h"

namespace bps::transport::shm {

class ShmData final : public DataEndpoint, public DirectAccess {
 public:
  ShmData(Fd socket, const Hello& made_by, EventLoop& loop, Counters& counters, const ShmOptions& options);
  ~ShmData() override;

  void connect(const Deadline& deadline, const std::string& whom);  // is the set-up of the connecting side
  void start();                                                     // watches the socket
  int poll();
  bool arm();
  void disarm();
  void withdraw(std::uint64_t key);

  std::size_t write(std::span<const WriteOp> ops) override;
  bool is_flushed() const override { return is_lost() || !out_ || out_->is_drained(); }
  bool peer_reaches(const Region& region) const override;
  bool peer_maps(const Region& region) const override;
  std::size_t post(std::span<const Posting> postings) override;
  std::byte* map(const RemoteSpan& span) override;
  Status get(const RemoteSpan& span, std::byte* into) override;
  Status put(const RemoteSpan& span, const std::byte* from) override;
  bool share(const Region& region) override { return !is_lost() && announce(region); }
  std::shared_ptr<SharedMemory> hold(const RemoteSpan& span) override;
  bool is_fenced() override;
  void take_rest() override;
  bool can_fence() const override { return may_end() || process_.is_this(); }
  void fence() override;

 private:
  void set_rings(std::shared_ptr<SharedMemory> rings, bool caller, Fd doorbell);
  ShmRecord probe_record(ShmRecord::Kind kind) const;
  void on_socket();
  bool take_record();
  bool take_record(const ShmRecord& record, std::vector<Fd>& fds);
  bool refuse(std::uint64_t key);
  bool announce(const Region& region);
  static std::string why_lost(int error);
  const PeerMemory::Region* find(const RemoteSpan& span);
  Status copy(const RemoteSpan& span, std::byte* here, bool reads);
  bool may_end() const { return options_.end_lost_peers && process_.has_handle(); }
  void sever() override;
  void on_loss_noted() override;

  Fd socket_;
  EventLoop& loop_;
  Counters& counters_;
  const ShmOptions options_;
  const PeerProcess process_;
  PeerMemory memory_;
  PeerProcess::Probe probe_{};
  bool peer_reaches_plain_ = false;
  bool watched_ = false;

  std::shared_ptr<SharedMemory> rings_;
  std::optional<RingOut> out_;
  std::optional<RingConsumer> in_;
  RecordReader records_{codec::kSize<ShmRecord>};
  Announcements announcements_;
  WrittenTokens written_;
};

}  // namespace bps::transport::shm
