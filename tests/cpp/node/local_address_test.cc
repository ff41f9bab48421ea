// SPDX-License-Identifier: Apache-2.0
#include "node/local_address.h"

#include <gtest/gtest.h>

namespace bps::node {
namespace {

using Names = std::vector<std::string>;
const Names kAll = {"lo", "eth0", "eth1", "eth10", "docker0", "ib0"};

TEST(Interfaces, NamesAndBeginningsOfNames) {
  EXPECT_EQ(interface_names("", kAll), Names{});
  EXPECT_EQ(interface_names("eth1", kAll), Names{"eth1"}) << "a name that exists means that one";
  EXPECT_EQ(interface_names("ib0,eth0", kAll), (Names{"ib0", "eth0"})) << "in the order of the list";
  EXPECT_EQ(interface_names("eth", kAll), (Names{"eth0", "eth1", "eth10"}));
  EXPECT_EQ(interface_names("eth1,eth", kAll), (Names{"eth1", "eth0", "eth10"})) << "each once";
  EXPECT_EQ(interface_names("=eth,ib0", kAll), (Names{"eth", "ib0"}));
  EXPECT_EQ(interface_names("bond", kAll), Names{"bond"}) << "the error will name it";
}

TEST(Interfaces, AllBut) {
  EXPECT_EQ(interface_names("^docker,lo", kAll), Names{});
  EXPECT_TRUE(excludes("^docker,lo", "docker0"));
  EXPECT_TRUE(excludes("^docker,lo", "lo"));
  EXPECT_FALSE(excludes("^docker,lo", "eth0"));
  EXPECT_TRUE(excludes("^=eth1", "eth1"));
  EXPECT_FALSE(excludes("^=eth1", "eth10"));
  EXPECT_FALSE(excludes("docker", "docker0"));
}

TEST(Interfaces, AnExcludedRouteIsNotTaken) {
  EXPECT_EQ(local_address("", "^docker", "127.0.0.1"), "127.0.0.1");
  EXPECT_EQ(local_address("10.1.2.3", "^lo", "127.0.0.1"), "10.1.2.3") << "what is set counts";
  EXPECT_THROW((void)local_address("", "^a,b,c,d,e,f,g,h,i,j,k,l,m,n,o,p,q,r,s,t,u,v,w,x,y,z", "127.0.0.1"),
               std::exception);
}

TEST(Addresses, LoopbackIsNotForOthers) {
  const std::string ours = address_for_others("127.0.0.1");
  if (ours == "127.0.0.1") GTEST_SKIP() << "this host has no other address";
  EXPECT_FALSE(is_loopback(ours));
  EXPECT_EQ(name_for_others("127.0.1.1"), ours);
  EXPECT_EQ(name_for_others("localhost"), ours);
  EXPECT_EQ(name_for_others("no-such-host.invalid"), ours);
  EXPECT_EQ(name_for_others(ours), ours);
  EXPECT_TRUE(is_of_this_host(ours));
  EXPECT_TRUE(is_of_this_host("0.0.0.0"));
  EXPECT_EQ(local_address("", "", "127.0.0.1"), "127.0.0.1") << "a job of this host alone";
}

}  // namespace
}  // namespace bps::node
