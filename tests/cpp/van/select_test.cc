#include "van/select.h"

#include <gtest/gtest.h>

#include "core/error.h"

namespace bps::van {
namespace {

using List = std::vector<std::string>;

Node node(std::uint32_t id, const std::string& host, const List& transports) {
  Node made;
  made.id = id;
  made.host_key = host;
  for (const auto& transport : transports) made.addresses.push_back({transport, {}});
  return made;
}

TEST(Select, UnderstandsListsAndBytePs) {
  EXPECT_EQ(allowed_transports("auto"), (List{"shm", "rdma", "tcp"}));
  EXPECT_EQ(allowed_transports("tcp"), List{"tcp"});
  EXPECT_EQ(allowed_transports("shm,tcp"), (List{"shm", "tcp"}));
  EXPECT_EQ(allowed_transports("1"), List{"rdma"});
  EXPECT_EQ(allowed_transports("ibverbs"), List{"rdma"});
  EXPECT_EQ(allowed_transports("0"), (List{"shm", "tcp"}));
  EXPECT_EQ(allowed_transports("zmq"), (List{"shm", "tcp"}));
  for (const char* bad : {"carrier-pigeon", "shm,", ",tcp", "tcp rdma", "auto,tcp"}) {
    EXPECT_THROW(allowed_transports(bad), Error) << bad;
  }
}

TEST(Select, TakesTheFirstThatBothSidesHave) {
  const Node here = node(1, "a", {"shm", "tcp", "rdma"});
  const Node near = node(2, "a", {"shm", "tcp", "rdma"});
  const Node far = node(3, "b", {"shm", "tcp", "rdma"});
  const Node plain = node(4, "c", {"shm", "tcp"});
  const auto automatic = allowed_transports("auto");
  EXPECT_EQ(select_transport(automatic, here, here), "self");
  EXPECT_EQ(select_transport(automatic, here, near), "shm");
  EXPECT_EQ(select_transport(automatic, here, far), "rdma");
  EXPECT_EQ(select_transport(automatic, here, plain), "tcp");
  EXPECT_EQ(select_transport(automatic, plain, far), "tcp") << "the caller has none";
  EXPECT_EQ(select_transport(allowed_transports("rdma"), here, near), "rdma");
  EXPECT_EQ(select_transport(allowed_transports("rdma"), plain, plain), "self");
  EXPECT_EQ(select_transport(allowed_transports("0"), here, far), "tcp");
}

TEST(Select, SaysWhyNothingFits) {
  const Node here = node(1, "a", {"shm", "tcp"});
  const Node far = node(3, "b", {"shm", "tcp", "rdma"});
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
