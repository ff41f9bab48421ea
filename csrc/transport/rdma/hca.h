// SPDX-License-Identifier: Apache-2.0
// Says which ports of which devices may be used, in the grammar that users know from NCCL_IB_HCA. It lists device names
// with commas between them, each with an optional ":port". A name stands for every device that starts with it. "=" in
// front of the list makes names exact, "^" in front of that excludes instead.
//   mlx5        mlx5_0:1,mlx5_2        =mlx5_1        ^=mlx5_3,mlx5_4
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace bps::transport::rdma {

class HcaFilter {
 public:
  // Empty text matches everything. Throws kInvalidArgument.
  static HcaFilter parse(std::string_view text);

  bool matches(std::string_view device, unsigned port) const;
  // Returns where the list names the port, so that the order of the list is the order of use; 0 when it does not say.
  std::size_t place(std::string_view device, unsigned port) const;
  // Returns true when the user listed what to use, one by one. Several ports then mean several rails.
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
