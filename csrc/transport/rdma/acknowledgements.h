// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace bps::transport::rdma {

// Tells whether the peer's device acknowledges what is sent, by regular looks at the number of requests that are
// finished. It counts looks and not the time: a process that was stopped, and sees nothing of what has come in
// meanwhile, takes nobody for silent.
class Acknowledgements {
 public:
  void look(std::uint64_t posted, std::uint64_t completed) {
    if (posted == completed || completed != completed_) {
      missed_ = 0;
    } else {
      ++missed_;
    }
    completed_ = completed;
  }
  // Returns for how many looks requests have been under way of which none has finished.
  std::uint32_t missed() const { return missed_; }

 private:
  std::uint64_t completed_ = 0;
  std::uint32_t missed_ = 0;
};

}  // namespace bps::transport::rdma
