// SPDX-License-Identifier: Apache-2.0
#include "transport/tcp/tcp_rails.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "node/tcp_rails.h"
#include "transport/rails.h"

namespace bps::transport::tcp {
namespace {

TEST(TcpRails, AddressesThereAndBack) {
  const std::vector<TcpAddress> addresses{{"10.0.0.1", 4711, 25'000}, {"fd00::1", 1, 0}, {"host.example", 65535, 1}};
  EXPECT_EQ(parse_addresses(to_text(addresses)), addresses);
  EXPECT_EQ(in_words(to_text(addresses)), "10.0.0.1 4711, fd00::1 1, host.example 65535");
}

TEST(TcpRails, OtherTextsAreRefused) {
  for (const char* text : {"", "10.0.0.1", "10.0.0.1 4711", "10.0.0.1 0 1", "10.0.0.1 65536 1", " 4711 1",
                           "10.0.0.1 4711 -1", "10.0.0.1 4711 1 1", "10.0.0.1 4711 1,", "10.0.0.1 4711x 1"}) {
    EXPECT_FALSE(parse_addresses(text).has_value()) << text;
  }
  const std::vector<TcpAddress> many(kMostRails + 1, {"a", 1, 1});
  EXPECT_FALSE(parse_addresses(to_text(many)).has_value());
}

TEST(TcpRails, ConnectionsUseEveryRailOfBothSides) {
  const Rails third = rails_of(2, 2, 3);
  EXPECT_EQ(third.here, 0);
  EXPECT_EQ(third.there, 2);
  EXPECT_EQ(rails_of(5, 0, 1).here, 0);
  EXPECT_EQ(slower(25'000, 10'000), 10'000U);
  EXPECT_EQ(slower(25'000, 0), 0U);
}

TEST(TcpRails, SpeedIsWhatTheDriverTells) {
  const std::filesystem::path folder = std::filesystem::path(::testing::TempDir()) / "interface-speeds";
  const auto speed_of = [&](const std::string& text) {
    std::filesystem::create_directories(folder / "eth0");
    std::ofstream(folder / "eth0/speed") << text;
    return node::interface_speed("eth0", folder);
  };
  EXPECT_EQ(speed_of("25000\n"), 25'000U);
  EXPECT_EQ(speed_of("-1\n"), 0U) << "a virtual interface";
  EXPECT_EQ(speed_of(""), 0U);
  EXPECT_EQ(node::interface_speed("eth1", folder), 0U);
  EXPECT_EQ(node::interface_speed("", folder), 0U);
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace bps::transport::tcp
