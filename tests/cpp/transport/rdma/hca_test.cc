// SPDX-License-Identifier: Apache-2.0
#include "transport/rdma/hca.h"

#include <gtest/gtest.h>

#include <random>

#include "core/error.h"

namespace bps::transport::rdma {
namespace {

TEST(Hca, EmptyMatchesEverything) {
  EXPECT_TRUE(HcaFilter::parse("").matches("mlx5_0", 1));
  EXPECT_FALSE(HcaFilter::parse("").names_ports());
}

TEST(Hca, ANameIsAPrefixUnlessExact) {
  const auto prefix = HcaFilter::parse("mlx5_1");
  EXPECT_TRUE(prefix.matches("mlx5_1", 1));
  EXPECT_TRUE(prefix.matches("mlx5_10", 2));
  EXPECT_FALSE(prefix.matches("mlx5_2", 1));
  const auto exact = HcaFilter::parse("=mlx5_1");
  EXPECT_TRUE(exact.matches("mlx5_1", 2));
  EXPECT_FALSE(exact.matches("mlx5_10", 1));
  EXPECT_TRUE(exact.names_ports());
}

TEST(Hca, APortNarrows) {
  const auto filter = HcaFilter::parse("mlx5_0:2,mlx5_1");
  EXPECT_FALSE(filter.matches("mlx5_0", 1));
  EXPECT_TRUE(filter.matches("mlx5_0", 2));
  EXPECT_TRUE(filter.matches("mlx5_1", 7));
  EXPECT_TRUE(HcaFilter::parse("=mlx5_0:1:0:3").matches("mlx5_0", 1)) << "fields of newer versions follow the port";
}

TEST(Hca, ExclusionIsTheComplement) {
  std::mt19937 random(1);
  const std::vector<std::string> names{"mlx5_0", "mlx5_1", "mlx5_10", "rxe0", "mlx4_0"};
  for (int round = 0; round < 500; ++round) {
    std::string list;
    for (int i = 0; i < 3; ++i) {
      list += (i > 0 ? "," : "") + names[random() % names.size()];
      if (random() % 2 == 0) list += ":" + std::to_string(1 + random() % 2);
    }
    const std::string equals = random() % 2 == 0 ? "=" : "";
    const auto with = HcaFilter::parse(equals + list);
    const auto without = HcaFilter::parse("^" + equals + list);
    EXPECT_FALSE(without.names_ports());
    for (const auto& name : names) {
      for (unsigned port = 1; port <= 2; ++port) {
        EXPECT_NE(with.matches(name, port), without.matches(name, port)) << list << " " << name << ":" << port;
      }
    }
  }
}

TEST(Hca, TheOrderOfTheListIsTheOrderOfUse) {
  const auto filter = HcaFilter::parse("mlx5_3,mlx5_0:2,mlx5_0");
  EXPECT_EQ(filter.place("mlx5_3", 1), 0U);
  EXPECT_EQ(filter.place("mlx5_0", 2), 1U);
  EXPECT_EQ(filter.place("mlx5_0", 1), 2U);
}

TEST(Hca, NonsenseIsAnError) {
  for (const char* text : {"mlx5_0:", "mlx5_0:x", "mlx5_0:0", "mlx5_0:256", ":1", "mlx5_0:1x", "^=:2"}) {
    EXPECT_THROW(HcaFilter::parse(text), Error) << text;
  }
  EXPECT_TRUE(HcaFilter::parse(",mlx5_0,,").matches("mlx5_0", 1));
}

}  // namespace
}  // namespace bps::transport::rdma
