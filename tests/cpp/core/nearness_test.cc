// SPDX-License-Identifier: Apache-2.0
#include "core/nearness.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <vector>

namespace bps {
namespace {

class NearnessTest : public testing::Test {
 protected:
  NearnessTest() : sysfs_(std::filesystem::temp_directory_path() / ("bps-sysfs-" + std::to_string(::getpid()))) {}
  ~NearnessTest() override { std::filesystem::remove_all(sysfs_); }

  // Adds a device behind these bridges. Returns its link, as the folders of buses and classes have them.
  std::string add(const std::string& way, int node) {
    const auto place = sysfs_ / "devices" / way;
    std::filesystem::create_directories(place);
    std::ofstream(place / "numa_node") << node << '\n';
    const auto link = sysfs_ / ("link" + std::to_string(++links_));
    std::filesystem::create_directory_symlink(place, link);
    return link;
  }

  const std::filesystem::path sysfs_;
  int links_ = 0;
};

TEST_F(NearnessTest, IsTheWayThatTwoDevicesShare) {
  const auto gpu = add("pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:00.0/0000:1a:00.0", 0);
  const auto same_switch = add("pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:04.0/0000:1c:00.0", 0);
  const auto same_port = add("pci0000:16/0000:16:01.0/0000:1e:00.0", 0);
  const auto same_root = add("pci0000:16/0000:16:03.0/0000:2c:00.0", 0);
  const auto same_node = add("pci0000:30/0000:30:01.0/0000:31:00.0", 0);
  const auto elsewhere = add("pci0000:80/0000:80:01.0/0000:81:00.0", 1);
  EXPECT_EQ(distance_of(gpu, same_switch), (Distance{Nearness::kSwitch, 3}));
  EXPECT_EQ(distance_of(gpu, same_port), (Distance{Nearness::kSwitch, 2}));
  EXPECT_EQ(distance_of(gpu, same_root), (Distance{Nearness::kRoot, 1}));
  EXPECT_EQ(distance_of(gpu, same_node), (Distance{Nearness::kNode, 0}));
  EXPECT_EQ(distance_of(gpu, elsewhere), Distance{});
  const std::vector<std::string> nics{same_switch, same_port, same_root, same_node, elsewhere};
  for (std::size_t i = 1; i < nics.size(); ++i) {
    EXPECT_TRUE(distance_of(gpu, nics[i - 1]).is_less_than(distance_of(gpu, nics[i]))) << i;
    EXPECT_FALSE(distance_of(gpu, nics[i]).is_less_than(distance_of(gpu, nics[i - 1]))) << i;
    EXPECT_EQ(distance_of(gpu, nics[i]), distance_of(nics[i], gpu)) << i;
  }
}

TEST_F(NearnessTest, OfVirtualFunctionsIsThatOfTheirCards) {
  const auto gpu = add("pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:00.0/0000:1a:00.4", 0);
  const auto card = add("pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:04.0/0000:1c:00.0", 0);
  const auto of_card = add("pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:04.0/0000:1c:01.2", 0);
  EXPECT_EQ(distance_of(gpu, of_card), distance_of(gpu, card));
  EXPECT_EQ(distance_of(gpu, of_card).nearness, Nearness::kSwitch);
}

// In a virtual machine, all that it was given may lie at one root.
TEST_F(NearnessTest, IsTheSameWhereAllLieAtOneRoot) {
  const auto gpu = add("pci0000:00/0000:00:05.0", -1);
  const auto nic = add("pci0000:00/0000:00:06.0", -1);
  const auto other = add("pci0000:00/0000:00:07.0", -1);
  EXPECT_EQ(distance_of(gpu, nic), (Distance{Nearness::kRoot, 1}));
  EXPECT_EQ(distance_of(gpu, nic), distance_of(gpu, other));
}

TEST_F(NearnessTest, IsFarWhereNothingIsKnown) {
  const auto gpu = add("pci0000:16/0000:16:01.0/0000:1a:00.0", -1);
  const auto nic = add("pci0000:38/0000:38:01.0/0000:3a:00.0", -1);
  const auto soft = add("virtual/infiniband/rxe0", 0);
  const std::string gone = sysfs_ / "gone";
  EXPECT_EQ(distance_of(gpu, nic), Distance{}) << "no node is the same as no other";
  EXPECT_EQ(distance_of(gpu, soft), Distance{});
  EXPECT_EQ(distance_of(gpu, gone), Distance{});
  EXPECT_EQ(distance_of(gone, gone), Distance{});
  EXPECT_EQ(distance_of("", nic), Distance{});
}

TEST_F(NearnessTest, IsNotThatOfAnotherDomain) {
  const auto gpu = add("pci0000:16/0000:16:01.0/0000:1a:00.0", -1);
  const auto nic = add("pci0001:16/0001:16:01.0/0001:1a:00.0", -1);
  EXPECT_EQ(distance_of(gpu, nic), Distance{});
}

}  // namespace
}  // namespace bps
