// SPDX-License-Identifier: Apache-2.0
// Implements the data endpoint of rdma: a window of write requests on one queue pair. rdma_data_path.cc is hot.
//
// A write is one request, RDMA WRITE WITH IMMEDIATE, of up to two pieces of memory: the header, from a small ring that
// is registered with the endpoint, and the payload from where it lies. A write longer than kLongestPiece takes several
// requests, the last of which carries the immediate; a queue pair keeps their order. A batch is a chain that costs one
// doorbell. What is small enough travels within the request itself (inline).
//
// The last request of a batch, and every 16th in a long one, asks for a completion, which stands for those before it.
// So a completion comes soon for every write, as tokens, windows and registrations want it, and a batch of 16
// partitions costs one.
//
// Belongs to the thread of the loop.
#pragma once

#include <array>
#include <memory>

#include "transport/rdma/rdma_endpoint.h"

namespace bps::transport::rdma {

class RdmaData final : public RdmaEndpoint<DataEndpoint> {
 public:
  RdmaData(const Hello& made_by, TransportState& state, RcConnection connection);
  ~RdmaData() override { drop(); }

  std::size_t write(std::span<const WriteOp> ops) override;
  bool is_flushed() const override { return is_lost() || completed_ == posted_; }

  void on_sent(std::uint64_t number) override;
  void on_arrived(const ibv_wc& completion) override;
  bool awaits_completions() const override { return tokens_ > 0 || wants_room_; }
  void look() override { acknowledgements.look(posted_, completed_); }
  void give_up_sends() override {
    if (posted_ > 0) on_sent(posted_ - 1);
  }
  void drop() override;

 private:
  struct Pending {
    std::uint64_t token = kNoToken;
    Registration* source = nullptr;
  };

  bool build(const WriteOp& op);
  void ring(std::uint64_t first);

  std::uint64_t posted_ = 0;  // how many requests ever; number n is in place n % kDataWindow
  std::uint64_t completed_ = 0;
  std::uint64_t signalled_ = 0;  // how many requests up to the last one that asked for a completion
  std::uint32_t tokens_ = 0;     // how many are on the way
  bool wants_room_ = false;
  std::array<ibv_send_wr, kDataWindow> requests_{};
  std::array<std::array<ibv_sge, 2>, kDataWindow> pieces_{};
  std::array<Pending, kDataWindow> pending_{};
  struct alignas(kMaxHeader) Header {
    std::array<std::byte, kMaxHeader> bytes;
  };
  std::unique_ptr<std::array<Header, kDataWindow>> headers_;
  Mr headers_memory_;
};

}  // namespace bps::transport::rdma
