// SPDX-License-Identifier: Apache-2.0
#include "van/select.h"

#include <gtest/gtest.h>

#include "core/error.h"

namespace bps::van {
namespace {

using transport::Kind;
using List = std::vector<Kind>;

Node node(std::uint32_t id, const std::string& host, const List& transports) {
  Node made;
  made.id = id;
  made.host_key = host;
  for (const Kind kind : transports) made.addresses.push_back({std::string(transport::to_string(kind)), {}});
  return made;
}

TEST(Select, UnderstandsListsAndBytePs) {
  EXPECT_EQ(allowed_transports("auto"), (List{Kind::kShm, Kind::kRdma, Kind::kTcp}));
  EXPECT_EQ(allowed_transports("tcp"), List{Kind::kTcp});
  EXPECT_EQ(allowed_transports("shm,tcp"), (List{Kind::kShm, Kind::kTcp}));
  EXPECT_EQ(allowed_transports("1"), List{Kind::kRdma});
  EXPECT_EQ(allowed_transports("ibverbs"), List{Kind::kRdma});
  EXPECT_EQ(allowed_transports("0"), (List{Kind::kShm, Kind::kTcp}));
  EXPECT_EQ(allowed_transports("zmq"), (List{Kind::kShm, Kind::kTcp}));
  for (const char* bad : {"carrier-pigeon", "shm,", ",tcp", "tcp rdma", "auto,tcp", "self"}) {
    EXPECT_THROW(allowed_transports(bad), Error) << bad;
  }
}

TEST(Select, TakesTheFirstThatBothSidesHave) {
  const Node here = node(1, "a", {Kind::kShm, Kind::kTcp, Kind::kRdma});
  const Node near = node(2, "a", {Kind::kShm, Kind::kTcp, Kind::kRdma});
  const Node far = node(3, "b", {Kind::kShm, Kind::kTcp, Kind::kRdma});
  const Node plain = node(4, "c", {Kind::kShm, Kind::kTcp});
  const auto automatic = allowed_transports("auto");
  EXPECT_EQ(select_transport(automatic, here, here), Kind::kSelf);
  EXPECT_EQ(select_transport(automatic, here, near), Kind::kShm);
  EXPECT_EQ(select_transport(automatic, here, far), Kind::kRdma);
  EXPECT_EQ(select_transport(automatic, here, plain), Kind::kTcp);
  EXPECT_EQ(select_transport(automatic, plain, far), Kind::kTcp) << "the caller has none";
  EXPECT_EQ(select_transport(allowed_transports("rdma"), here, near), Kind::kRdma);
  EXPECT_EQ(select_transport(allowed_transports("rdma"), plain, plain), Kind::kSelf);
  EXPECT_EQ(select_transport(allowed_transports("0"), here, far), Kind::kTcp);
}

TEST(Select, SaysWhyNothingFits) {
  const Node here = node(1, "a", {Kind::kShm, Kind::kTcp});
  const Node far = node(3, "b", {Kind::kShm, Kind::kTcp, Kind::kRdma});
  try {
    select_transport(allowed_transports("shm,rdma"), here, far);
    FAIL() << "nothing fits";
  } catch (const Error& error) {
    const std::string what = error.what();
    EXPECT_EQ(error.code(), ErrorCode::kUnreachable);
    EXPECT_NE(what.find("another host"), std::string::npos) << what;
    EXPECT_NE(what.find("rdma: this process has none"), std::string::npos) << what;
  }
}

}  // namespace
}  // namespace bps::van
