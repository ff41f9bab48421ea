// SPDX-License-Identifier: Apache-2.0
// What somebody sees who listens to a simulated network: each message and write as it is sent, and as the receiving
// process takes it. The models' actions are recorded so, see model_rounds.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace bps::sim {

class Tap {
 public:
  enum class Moment { kSent, kTaken };

  virtual ~Tap() = default;
  virtual void on_message(Moment moment, std::uint32_t from, std::uint32_t to, std::span<const std::byte> message) = 0;
  // `header` comes before the payload; an answer has none.
  virtual void on_write(Moment moment, std::uint32_t from, std::uint32_t to, std::span<const std::byte> header,
                        std::uint32_t immediate) = 0;
};

}  // namespace bps::sim
