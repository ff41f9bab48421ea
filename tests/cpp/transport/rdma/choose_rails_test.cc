// SPDX-License-Identifier: Apache-2.0
#include "transport/rdma/choose_rails.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>

#include "transport/rails.h"
#include "transport/rdma/port_speed.h"

namespace bps::transport::rdma {
namespace {

RailCandidate port(const std::string& device, const std::string& address, std::uint32_t speed = 100'000,
                   int numa_node = -1, GidType type = GidType::kRoceV2) {
  Gid gid{};
  const std::string six = address.find(':') == std::string::npos ? "::ffff:" + address : address;
  EXPECT_EQ(::inet_pton(AF_INET6, six.c_str(), gid.data()), 1) << address;
  return {.speed = speed,
          .numa_node = numa_node,
          .gids = {{.device = device,
                    .index = 3,
                    .type = type,
                    .gid = gid,
                    .address = address,
                    .interface = "eth" + device.substr(device.find('_') + 1)}}};
}

std::string devices(const RailChoice& choice) {
  std::string names;
  for (const Rail& rail : choice.rails) names += rail.device + " ";
  return names;
}

const std::vector<RailCandidate> kThree{port("mlx5_0", "10.0.0.1"), port("mlx5_1", "10.0.1.1", 25'000),
                                        port("mlx5_2", "10.0.2.1")};

TEST(ChooseRails, AllThatAreUsable) {
  const RailChoice choice = choose_rails(kThree, {});
  EXPECT_EQ(devices(choice), "mlx5_0 mlx5_1 mlx5_2 ");
  EXPECT_EQ(choice.rails[1].speed, 25'000U);
  EXPECT_EQ(choice.rails[1].address, "10.0.1.1");
}

TEST(ChooseRails, ThatOfTheProcessIsTheFirst) {
  EXPECT_EQ(devices(choose_rails(kThree, {.gid = {.index = {}, .address = "10.0.2.1", .interfaces = {}}})),
            "mlx5_2 mlx5_0 mlx5_1 ");
}

TEST(ChooseRails, NoneThatIsDown) {
  auto ports = kThree;
  ports[1].gids[0].port_active = false;
  EXPECT_EQ(devices(choose_rails(ports, {})), "mlx5_0 mlx5_2 ");
}

TEST(ChooseRails, NoneOfAnotherKindThanTheBest) {
  auto ports = kThree;
  ports.push_back(port("mlx5_3", "192.168.4.1", 200'000, -1, GidType::kInfiniBand));
  ports.push_back(port("mlx5_4", "fd00::4"));
  ports.push_back(port("mlx5_5", "fe80::5"));
  ports.push_back(port("mlx5_6", "10.0.6.1", 100'000, -1, GidType::kRoceV1));
  EXPECT_EQ(devices(choose_rails(ports, {})), "mlx5_0 mlx5_1 mlx5_2 ");
}

TEST(ChooseRails, ThoseOfTheInterfacesThatWereNamed) {
  const RailWish wish{.gid = {.index = {}, .address = "10.0.1.1", .interfaces = {"eth1", "eth2"}}};
  EXPECT_EQ(devices(choose_rails(kThree, wish)), "mlx5_1 mlx5_2 ");
  const RailWish without{.gid = {.index = {}, .address = "", .interfaces = {"bond0"}}};
  EXPECT_EQ(devices(choose_rails(kThree, without)), "mlx5_0 mlx5_1 mlx5_2 ")
      << "an interface without RDMA says nothing";
}

TEST(ChooseRails, TheNearestOnes) {
  const std::vector<RailCandidate> ports{port("mlx5_0", "10.0.0.1", 100'000, 0), port("mlx5_1", "10.0.1.1", 100'000, 1),
                                         port("mlx5_2", "10.0.2.1", 100'000, 1)};
  EXPECT_EQ(devices(choose_rails(ports, {.gid = {}, .near_nodes = {1}})), "mlx5_1 mlx5_2 ");
  EXPECT_EQ(devices(choose_rails(ports, {.gid = {}, .near_nodes = {2}})), "mlx5_0 mlx5_1 mlx5_2 ") << "none is near";
  EXPECT_EQ(devices(choose_rails(ports, {.gid = {}, .named = true, .near_nodes = {1}})), "mlx5_0 mlx5_1 mlx5_2 ")
      << "the user knows better";
}

TEST(ChooseRails, TheNearestOnesToTheGpu) {
  const Distance near{Nearness::kSwitch, 3}, at_root{Nearness::kRoot, 1}, far{};
  auto ports = kThree;
  const auto at = [&](Distance first, Distance second, Distance third) {
    ports[0].from_gpu = first;
    ports[1].from_gpu = second;
    ports[2].from_gpu = third;
    return devices(choose_rails(ports, {}));
  };
  EXPECT_EQ(at(far, near, at_root), "mlx5_1 ");
  EXPECT_EQ(at(near, far, near), "mlx5_0 mlx5_2 ");
  EXPECT_EQ(at(far, at_root, at_root), "mlx5_1 mlx5_2 ");
  EXPECT_EQ(at({Nearness::kSwitch, 2}, near, far), "mlx5_1 ") << "the nearer of two switches";
  EXPECT_EQ(at(far, far, {Nearness::kNode, 0}), "mlx5_2 ");
  EXPECT_EQ(at(far, far, far), "mlx5_0 mlx5_1 mlx5_2 ") << "none is near";
  (void)at(near, far, far);
  ports[0].gids.clear();
  EXPECT_EQ(devices(choose_rails(ports, {})), "mlx5_1 mlx5_2 ") << "the nearest one cannot be used";
  (void)at(far, near, at_root);
  EXPECT_EQ(devices(choose_rails(ports, {.gid = {}, .named = true})), "mlx5_1 mlx5_2 ") << "the user knows better";
  ports = kThree;
  ports[0].from_gpu = near;
  const RailWish wish{.gid = {.index = {}, .address = "", .interfaces = {"eth1", "eth2"}}};
  EXPECT_EQ(devices(choose_rails(ports, wish)), "mlx5_1 mlx5_2 ") << "and here";
}

TEST(ChooseRails, TheOrderOfTheListIsTheOrderOfUse) {
  auto ports = kThree;
  ports[0].place = 2;
  ports[1].place = 0;
  ports[2].place = 1;
  EXPECT_EQ(devices(choose_rails(ports, {.gid = {}, .named = true})), "mlx5_1 mlx5_2 mlx5_0 ");
}

TEST(ChooseRails, NoMoreThanAProcessCanUse) {
  std::vector<RailCandidate> ports;
  for (int i = 0; i < 12; ++i) {
    ports.push_back(port("mlx5_" + std::to_string(i), "10.0.0." + std::to_string(i + 1)));
  }
  EXPECT_EQ(choose_rails(ports, {}).rails.size(), kMostRails);
}

TEST(ChooseRails, SaysWhyThereAreNone) {
  EXPECT_FALSE(choose_rails({}, {}).why_not.empty());
}

TEST(PortSpeed, OfVerbs) {
  EXPECT_EQ(port_speed(2, 32), 100'000U) << "4 lanes of EDR";
  EXPECT_EQ(port_speed(2, 128), 400'000U) << "4 lanes of NDR";
  EXPECT_EQ(port_speed(1, 4), 10'000U);
  EXPECT_EQ(port_speed(0, 0), 0U);
}

}  // namespace
}  // namespace bps::transport::rdma
