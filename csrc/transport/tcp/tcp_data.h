// SPDX-License-Identifier: Apache-2.0
// The data endpoint of tcp: one connection, a bounded queue of writes out, and frames in. Threading: the loop's.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "core/event_loop.h"
#include "transport/listener.h"
#include "transport/tcp/delivery_rate.h"
#include "transport/tcp/frame.h"
#include "transport/tcp/tcp_transport.h"
#include "transport/transport.h"

namespace bps::transport::tcp {

class TcpData final : public DataEndpoint {
 public:
  TcpData(Fd socket, const Hello& made_by, EventLoop& loop, Counters& counters, const TcpTransport::Regions& regions);
  ~TcpData() override;

  void start();
  int poll();
  bool idle() const { return written_.empty() && !is_loss_untold() && !(is_lost() && out_count_ > 0); }

  std::size_t write(std::span<const WriteOp> ops) override;
  std::uint64_t stop_landing(std::uint32_t immediate) override;
  bool is_silent() const override { return !is_lost() && is_network_silent(socket_.get()); }
  bool is_flushed() const override { return is_lost() || (out_count_ == 0 && !has_unacknowledged(socket_.get())); }
  Carried take_carried() override;
  MeasuredRate measured_rate() const override { return is_lost() ? MeasuredRate{} : delivery_rate(socket_.get()); }

 private:
  // Small enough that a full queue of 4 MB partitions is drained by one round trip of acknowledgements; a caller that
  // has more to say keeps it, where it can still be overtaken by something more urgent.
  static constexpr std::size_t kWindow = 32;
  static constexpr std::size_t kScratch = 16 * 1024;
  static constexpr std::size_t kLargestUnit = 16;

  struct Outgoing {
    TcpFrame frame;
    std::array<std::byte, kMaxHeader> header;
    std::size_t header_size;
    const std::byte* payload;
    std::uint64_t length;
    std::uint64_t token;
    std::uint64_t sent;  // of frame, header and payload together
    std::uint64_t total() const { return sizeof frame + header_size + length; }
  };

  void on_ready(std::uint32_t events);
  void transmit();
  void give_up_sends();
  void receive();
  std::uint64_t readable() const;
  bool take_scratch(std::size_t size);
  void land(const std::byte* data, std::size_t size);
  bool begin_frame();
  void end_frame();
  std::uint64_t cut_frame();
  void sever() override;

  Fd socket_;
  EventLoop& loop_;
  Counters& counters_;
  const TcpTransport::Regions& regions_;
  bool watched_ = false;
  bool want_write_ = false;
  Carried carried_;  // when it was asked last

  std::array<Outgoing, kWindow> out_;
  std::size_t out_head_ = 0;  // oldest
  std::size_t out_count_ = 0;
  WrittenTokens written_;

  TcpFrame frame_{};
  std::size_t frame_have_ = 0;
  bool in_payload_ = false;
  std::byte* target_ = nullptr;  // where the rest goes; null: nowhere, the region has been withdrawn
  std::uint64_t missing_ = 0;
  std::size_t unit_ = 1;        // bytes that land together: see DataSink::allows_write()
  std::size_t begun_have_ = 0;  // bytes of one that are here and have not landed
  std::array<std::byte, kLargestUnit> begun_;
  std::array<std::byte, kScratch> scratch_;
};

}  // namespace bps::transport::tcp
