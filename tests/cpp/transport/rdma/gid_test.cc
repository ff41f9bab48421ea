// SPDX-License-Identifier: Apache-2.0
#include "transport/rdma/gid.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace bps::transport::rdma {
namespace {

Gid gid(const std::string& address) {
  Gid bytes{};
  const std::string six = address.find(':') == std::string::npos ? "::ffff:" + address : address;
  EXPECT_EQ(::inet_pton(AF_INET6, six.c_str(), bytes.data()), 1) << address;
  return bytes;
}

GidEntry entry(unsigned index, const std::string& address, GidType type = GidType::kRoceV2,
               const std::string& interface = "eth0") {
  const Gid bytes = gid(address);
  return {
      .device = "mlx5_0", .index = index, .type = type, .gid = bytes, .address = ip_of(bytes), .interface = interface};
}

// As Linux fills it: every address of the interface in both versions, link-local first.
std::vector<GidEntry> usual() {
  return {entry(0, "fe80::1", GidType::kRoceV1),  entry(1, "fe80::1"),
          entry(2, "fd00::1", GidType::kRoceV1),  entry(3, "fd00::1"),
          entry(4, "10.0.0.1", GidType::kRoceV1), entry(5, "10.0.0.1")};
}

TEST(GidChoice, Scopes) {
  EXPECT_EQ(scope_of(Gid{}), GidScope::kNull);
  EXPECT_EQ(scope_of(gid("10.98.0.1")), GidScope::kIpv4);
  EXPECT_EQ(scope_of(gid("0.0.0.0")), GidScope::kNull);
  EXPECT_EQ(scope_of(gid("fe80::1")), GidScope::kLinkLocal);
  EXPECT_EQ(scope_of(gid("fe80::")), GidScope::kNull) << "a subnet prefix without a port";
  EXPECT_EQ(scope_of(gid("fd98::1")), GidScope::kGlobal);
  EXPECT_EQ(ip_of(gid("10.98.0.1")), "10.98.0.1");
  EXPECT_EQ(ip_of(gid("fd98::1")), "fd98::1");
  EXPECT_EQ(ip_of(Gid{}), "");
}

TEST(GidChoice, PrefersVersion2AndIpv4) {
  const auto table = usual();
  EXPECT_EQ(choose_gid(table, {}).entry->index, 5U);
}

TEST(GidChoice, FollowsTheAddressOfTheProcess) {
  const auto table = usual();
  const auto choice = choose_gid(table, {.index = {}, .address = "fd00::1", .interfaces = {}});
  EXPECT_EQ(choice.entry->index, 3U);
  EXPECT_NE(choice.reason.find("address of this process"), std::string::npos) << choice.reason;
  EXPECT_EQ(choose_gid(table, {.index = {}, .address = "192.168.9.9", .interfaces = {}}).entry->index, 5U)
      << "an address of a network without RDMA says nothing";
}

TEST(GidChoice, FollowsTheInterface) {
  auto table = usual();
  table.push_back(entry(6, "10.0.1.1", GidType::kRoceV2, "eth1"));
  EXPECT_EQ(choose_gid(table, {.index = {}, .address = "", .interfaces = {"eth1"}}).entry->index, 6U);
}

TEST(GidChoice, ObeysTheIndex) {
  const auto table = usual();
  EXPECT_EQ(choose_gid(table, {.index = 0, .address = "10.0.0.1", .interfaces = {}}).entry->index, 0U);
  const auto choice = choose_gid(table, {.index = 9, .address = "", .interfaces = {}});
  EXPECT_EQ(choice.entry, nullptr);
  EXPECT_NE(choice.reason.find('9'), std::string::npos);
}

TEST(GidChoice, TakesWhatIsLeft) {
  const std::vector<GidEntry> link_local{entry(0, "fe80::1", GidType::kRoceV1), entry(1, "fe80::1")};
  EXPECT_EQ(choose_gid(link_local, {}).entry->index, 1U);
  const std::vector<GidEntry> old{entry(0, "10.0.0.1", GidType::kRoceV1)};
  EXPECT_NE(choose_gid(old, {}).reason.find("for want of RoCE v2"), std::string::npos);
  EXPECT_EQ(choose_gid({}, {}).entry, nullptr);
}

TEST(GidChoice, InfiniBandNeedsAnIpInterface) {
  GidEntry port = entry(0, "fe80::2:c903:0:1", GidType::kInfiniBand, "ib0");
  port.address = "";
  EXPECT_EQ(choose_gid({&port, 1}, {}).entry, nullptr);
  port.address = "192.168.4.1";
  const auto choice = choose_gid({&port, 1}, {.index = {}, .address = "192.168.4.1", .interfaces = {}});
  ASSERT_EQ(choice.entry, &port);
  EXPECT_NE(choice.reason.find("InfiniBand, IPv4 192.168.4.1 of ib0"), std::string::npos) << choice.reason;
}

TEST(GidChoice, NamesThePortThatIsDown) {
  auto table = usual();
  for (auto& e : table) e.port_active = false;
  const auto choice = choose_gid(table, {});
  EXPECT_EQ(choice.entry, nullptr);
  EXPECT_NE(choice.reason.find("not active"), std::string::npos) << choice.reason;
}

// Whatever the table: the choice is one of it, usable, and nothing in the table beats it by the stated order; and the
// order of the rows does not matter.
TEST(GidChoice, HoldsForRandomTables) {
  std::mt19937 random(7);
  const std::vector<std::string> addresses{"10.0.0.1", "10.0.0.2", "fd00::1", "fe80::1", "0.0.0.0"};
  const auto rank = [](const GidEntry& e, const GidWish& w) {
    return std::tuple(e.port_active, !w.address.empty() && ip_of(e.gid) == w.address, e.type != GidType::kRoceV1,
                      w.names(e.interface), scope_of(e.gid));
  };
  for (int round = 0; round < 2000; ++round) {
    std::vector<GidEntry> table;
    for (unsigned i = 0; i < random() % 8; ++i) {
      table.push_back(entry(i, addresses[random() % addresses.size()],
                            random() % 2 == 0 ? GidType::kRoceV1 : GidType::kRoceV2, random() % 2 == 0 ? "a" : "b"));
      table.back().port_active = random() % 4 != 0;
    }
    GidWish wish;
    if (random() % 3 == 0) wish.address = addresses[random() % 4];
    if (random() % 3 == 0) wish.interfaces = {"c", "b"};
    const GidChoice choice = choose_gid(table, wish);
    EXPECT_FALSE(choice.reason.empty());
    const bool usable =
        std::ranges::any_of(table, [](const auto& e) { return e.port_active && scope_of(e.gid) != GidScope::kNull; });
    ASSERT_EQ(choice.entry != nullptr, usable);
    if (!usable) continue;
    for (const auto& other : table) {
      if (scope_of(other.gid) == GidScope::kNull) continue;
      EXPECT_GE(rank(*choice.entry, wish), rank(other, wish));
    }
    auto shuffled = table;
    std::ranges::shuffle(shuffled, random);
    EXPECT_EQ(rank(*choose_gid(shuffled, wish).entry, wish), rank(*choice.entry, wish));
  }
}

}  // namespace
}  // namespace bps::transport::rdma
