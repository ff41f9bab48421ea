// SPDX-License-Identifier: Apache-2.0
// Implements the data endpoint of tcp: one connection, a bounded queue of frames out, and frames in.
#pragma once

#include "core/event_loop.h"
#include "transport/listener.h"
#include "transport/tcp/delivery_rate.h"
#include "transport/tcp/incoming_frames.h"
#include "transport/tcp/outgoing_frames.h"
#include "transport/tcp/tcp_transport.h"
#include "transport/transport.h"

namespace bps::transport::tcp {

class TcpData final : public DataEndpoint {
 public:
  TcpData(Fd socket, const Hello& made_by, EventLoop& loop, Counters& counters, const TcpTransport::Regions& regions);
  ~TcpData() override;

  void start();
  int poll();
  bool idle() const { return written_.empty() && !is_loss_untold() && !(is_lost() && !outgoing_.is_empty()); }

  std::size_t write(std::span<const WriteOp> ops) override;
  std::uint64_t stop_landing(std::uint32_t immediate) override;
  bool is_silent() const override { return !is_lost() && is_network_silent(socket_.get()); }
  bool is_flushed() const override { return is_lost() || (outgoing_.is_empty() && !has_unacknowledged(socket_.get())); }
  void take_rest() override;
  Carried take_carried() override;
  MeasuredRate measured_rate() const override { return is_lost() ? MeasuredRate{} : delivery_rate(socket_.get()); }

 private:
  void on_ready(std::uint32_t events);
  void transmit();
  void receive();
  void receive_some();
  std::uint64_t readable() const;
  void sever() override;

  Fd socket_;
  EventLoop& loop_;
  Counters& counters_;
  bool watched_ = false;
  bool want_write_ = false;
  bool is_receiving_ = false;
  Carried carried_;  // what take_carried() read last
  OutgoingFrames outgoing_;
  WrittenTokens written_;
  IncomingFrames incoming_;
};

}  // namespace bps::transport::tcp
