// SPDX-License-Identifier: Apache-2.0
// Sends the contribution of a host to one partition in one round. The ranks of the host have pushed, and this process,
// their relay, sends the sum to the server.
//
// The sum is made when it can be sent (Transfer::fill), straight into the staging buffer that is sent, and the answer
// lands in the same buffer. Objects are used again, so that a contribution allocates nothing. Belongs to the loop's
// thread.
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
  // Makes it travel compressed, as the tensor was declared. This process has declared it, too.
  void compress(const std::shared_ptr<const Tensor>& tensor);

  tensor::Extent extent_of(const Part&) const override;
  Status fill(const Part& part, tensor::Extent& extent, std::byte* into, Counters& counters) override;
  Status take_answer(const Part& part, const tensor::Extent& extent, const std::byte* from,
                     Counters& counters) override;
  bool fail(ErrorCode code, const std::string& what, const std::string& hint) override;
  void note_missing(const std::string&, const std::vector<std::uint32_t>& ranks) override { missing_ = ranks; }
  tensor::Cancel make_cancel() const override;
  // Returns false: the ranks of the host have what has landed, so the next view needs nothing of it.
  bool suspend(std::uint32_t, const Landed&, bool failed) override {
    is_undecided_ = !failed;
    return false;
  }
  void finish(std::uint32_t count, bool answered, Counters& counters) override;

  // Takes the answer of a round in two phases, which is in its buffer. The server hears of it when the ranks of the
  // host have it.
  void land(std::uint32_t immediate, const std::byte* result);
  std::uint32_t immediate() const { return immediate_; }

  ServerConnection* server = nullptr;

 private:
  friend class HostContributions;
  HostContributions* pool_ = nullptr;
  std::uint32_t number_ = 0;  // the source's number for it, or kNobody
  tensor::PushHeader header_{};
  Part part_;
  std::shared_ptr<const Tensor> tensor_;  // null: it is not compressed
  std::uint64_t unrounded_bytes_ = 0;     // the most bytes that an exact sum can have; 0: it is not exact
  std::optional<Error> failure_;
  std::vector<std::uint32_t> missing_;
  std::uint32_t immediate_ = 0;
  bool delivered_ = false;
  bool is_undecided_ = false;  // it has ended, and its server has not said how
};

class HostContributions {
 public:
  // This is the number of a contribution whose outcome nobody waits for.
  static constexpr std::uint32_t kNobody = ~std::uint32_t{0};

  // Without a source contributions end silently.
  void set_source(tensor::ContributionSource* source) { source_ = source; }
  tensor::ContributionSource* source() const { return source_; }
  // Makes the end of the view the reason, from now on, where none is known.
  void end_view(const Error& why) { view_ended_ = why; }

  HostContribution& make(std::uint32_t number, const tensor::PushHeader& header, std::int32_t priority,
                         ServerConnection& server);
  // Returns the contribution of this number that is under way, or nullptr.
  HostContribution* find(std::uint32_t number) const;
  // Returns all that are under way to a server. Allocates.
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
