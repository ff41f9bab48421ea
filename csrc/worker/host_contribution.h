// SPDX-License-Identifier: Apache-2.0
// The contribution of a host to one partition in one round: its ranks have pushed, and this process, their relay, sends
// the sum to the server.
//
// The sum is made when it can be sent (Transfer::fill), straight into the staging buffer that is sent, and the answer
// lands in the same buffer. Objects are used again: no allocation per contribution. Threading: the loop's.
#pragma once

#include <deque>
#include <optional>
#include <vector>

#include "tensor/host_sum.h"
#include "worker/tensor.h"
#include "worker/transfer.h"

namespace bps::worker {

class HostContributions;
class ServerConnection;

class HostContribution final : public Transfer {
 public:
  // It travels as the tensor was declared, in this process too.
  void compress(const std::shared_ptr<const Tensor>& tensor);

  tensor::Extent extent_of(const Part&) const override;
  Status fill(const Part& part, tensor::Extent& extent, std::byte* into, Counters& counters) override;
  Status take_answer(const Part& part, const tensor::Extent& extent, const std::byte* from,
                     Counters& counters) override;
  bool fail(ErrorCode code, const std::string& what, const std::string& hint) override;
  void note_missing(const std::string&, const std::vector<std::uint32_t>& ranks) override { missing_ = ranks; }
  tensor::Cancel make_cancel() const override;
  // Its ranks have what has landed, so the next view needs nothing of it.
  bool suspend(std::uint32_t, const Landed&, bool failed) override {
    is_undecided_ = !failed;
    return false;
  }
  void finish(std::uint32_t count, bool answered, Counters& counters) override;

  // The answer of a round in two phases is in its buffer. The server hears of it when the ranks of the host have it.
  void land(std::uint32_t immediate, const std::byte* result);
  std::uint32_t immediate() const { return immediate_; }

  ServerConnection* server = nullptr;

 private:
  friend class HostContributions;
  HostContributions* pool_ = nullptr;
  std::uint32_t number_ = 0;  // as the source knows it, or kNobody
  tensor::PushHeader header_{};
  Part part_;
  std::shared_ptr<const Tensor> tensor_;  // if it is compressed
  std::uint64_t unrounded_bytes_ = 0;     // of an exact sum: the most there can be
  std::optional<Error> failure_;
  std::vector<std::uint32_t> missing_;
  std::uint32_t immediate_ = 0;
  bool delivered_ = false;
  bool is_undecided_ = false;  // it has ended, and its server has not said how
};

class HostContributions {
 public:
  // Nobody waits for the outcome of this one.
  static constexpr std::uint32_t kNobody = ~std::uint32_t{0};

  // Without a source contributions end silently.
  void set_source(tensor::ContributionSource* source) { source_ = source; }
  tensor::ContributionSource* source() const { return source_; }
  // The end of the view is the reason from now on where none is known.
  void end_view(const Error& why) { view_ended_ = why; }

  HostContribution& make(std::uint32_t number, const tensor::PushHeader& header, std::int32_t priority,
                         ServerConnection& server);
  // The one that is under way by that number, or nullptr.
  HostContribution* find(std::uint32_t number) const;
  // All that are under way to a server. Allocates.
  std::vector<HostContribution*> to(const ServerConnection& server);

 private:
  friend class HostContribution;
  void free(HostContribution& contribution);

  tensor::ContributionSource* source_ = nullptr;
  std::optional<Error> view_ended_;
  std::deque<HostContribution> all_;  // a deque: addresses stay
  std::vector<HostContribution*> free_;
  std::vector<HostContribution*> by_number_;
  std::uint64_t made_ = 0;
};

}  // namespace bps::worker
