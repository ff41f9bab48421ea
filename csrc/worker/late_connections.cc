// SPDX-License-Identifier: Apache-2.0
#include "worker/late_connections.h"

#include "core/interrupt.h"

namespace bps::worker {

void LateConnections::make(const Plan& plan) {
  {
    std::unique_lock lock(mutex_);
    (void)wait_until(lock, changed_, Deadline::never(), [this] { return !is_connecting_; });
    is_connecting_ = true;
  }
  const struct End {
    LateConnections& all;
    ~End() {
      const std::lock_guard lock(all.mutex_);
      all.is_connecting_ = false;
      all.changed_.notify_one();
    }
  } end{*this};
  for (std::size_t i = 0; i < plan.size(); ++i) {
    if (plan[i].empty() || connected_[i]) continue;
    connect_(i / places_, i % places_);
    connected_[i] = true;
  }
}

}  // namespace bps::worker
