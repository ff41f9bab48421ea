// SPDX-License-Identifier: Apache-2.0
// Says which ports of which devices may be used, in the grammar that users know from NCCL_IB_HCA: device names
// separated by commas, each with an optional ":port"; a name stands for every device that starts with it. "=" in front
// of the list makes names exact, "^" in front of that excludes instead.
//   mlx5        mlx5_0:1,mlx5_2        =mlx5_1        ^=mlx5_3,mlx5_4
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace bps::transport::rdma {

class HcaFilter {
 public:
  // Empty: everything matches. Throws kInvalidArgument.
  static HcaFilter parse(std::string_view text);

  bool matches(std::string_view device, unsigned port) const;
  // Where in the list the port is named, so that the order of the list is the order of use; 0 when it says nothing.
  std::size_t place(std::string_view device, unsigned port) const;
  // The user listed what to use, one by one: several ports then mean several rails.
  bool names_ports() const { return !exclude_ && !items_.empty(); }

 private:
  struct Item {
    std::string device;
    unsigned port = 0;  // 0: any
  };
  bool covers(const Item& item, std::string_view device, unsigned port) const;

  std::vector<Item> items_;
  bool exclude_ = false;
  bool exact_ = false;
};

}  // namespace bps::transport::rdma
