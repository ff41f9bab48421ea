// SPDX-License-Identifier: Apache-2.0
#include "transport/rdma/hca.h"

#include <algorithm>
#include <charconv>

#include "core/error.h"

namespace bps::transport::rdma {

HcaFilter HcaFilter::parse(std::string_view text) {
  HcaFilter filter;
  std::string_view left = text;
  const auto take = [&](char sign) {
    const bool there = left.starts_with(sign);
    if (there) left.remove_prefix(1);
    return there;
  };
  filter.exclude_ = take('^');
  filter.exact_ = take('=');
  while (!left.empty()) {
    std::string_view word = left.substr(0, left.find(','));
    left.remove_prefix(std::min(left.size(), word.size() + 1));
    if (word.empty()) continue;
    Item item;
    const std::size_t colon = word.find(':');
    item.device = word.substr(0, colon);
    if (colon != std::string_view::npos) {
      // Only the port is ours: newer versions of NCCL let more fields follow it.
      word.remove_prefix(colon + 1);
      word = word.substr(0, word.find(':'));
      const auto [stop, error] = std::from_chars(word.data(), word.data() + word.size(), item.port);
      if (error != std::errc() || stop != word.data() + word.size() || item.port < 1 || item.port > 255) {
        item.device.clear();
      }
    }
    if (item.device.empty()) {
      throw Error(ErrorCode::kInvalidArgument, "BPS_RDMA_HCA='" + std::string(text) + "' is not understood",
                  "list devices with optional ports, as in mlx5_0:1,mlx5_1; '=' in front: exact names, '^': all but");
    }
    filter.items_.push_back(std::move(item));
  }
  return filter;
}

bool HcaFilter::covers(const Item& item, std::string_view device, unsigned port) const {
  const bool named = exact_ ? device == item.device : device.starts_with(item.device);
  return named && (item.port == 0 || item.port == port);
}

bool HcaFilter::matches(std::string_view device, unsigned port) const {
  if (items_.empty()) return true;
  const bool covered = std::ranges::any_of(items_, [&](const Item& item) { return covers(item, device, port); });
  return covered != exclude_;
}

std::size_t HcaFilter::place(std::string_view device, unsigned port) const {
  if (exclude_) return 0;
  const auto found = std::ranges::find_if(items_, [&](const Item& item) { return covers(item, device, port); });
  return found == items_.end() ? 0 : static_cast<std::size_t>(found - items_.begin());
}

}  // namespace bps::transport::rdma
