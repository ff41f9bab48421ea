// SPDX-License-Identifier: Apache-2.0
#include "node/system_metrics.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace bps::node {
namespace {

// A tree like /sys/class/infiniband.
class RdmaCounters : public testing::Test {
 protected:
  RdmaCounters() : root_(std::filesystem::temp_directory_path() / ("bps-counters-" + std::to_string(::getpid()))) {}
  ~RdmaCounters() override { std::filesystem::remove_all(root_); }

  void write(const std::string& file, const std::string& text) {
    const auto path = root_ / "mlx5_0/ports/1" / file;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }
  std::string text(const std::vector<RdmaPort>& ports) { return to_text(rdma_port_families(ports, root_)); }

 private:
  const std::filesystem::path root_;
};

TEST_F(RdmaCounters, BytesAreBytesAndTheRestAreEvents) {
  write("counters/port_xmit_data", "1000\n");  // words of four bytes
  write("counters/port_rcv_data", "250\n");
  write("hw_counters/out_of_sequence", "7\n");
  write("hw_counters/lifespan", "10\n");
  write("hw_counters/broken", "N/A (no PMA)\n");
  const std::string found = text({{"mlx5_0", 1}});
  const std::string at = "{device=\"mlx5_0\",port=\"1\"";
  EXPECT_NE(found.find("bps_rdma_port_sent_bytes_total" + at + "} 4000\n"), std::string::npos) << found;
  EXPECT_NE(found.find("bps_rdma_port_received_bytes_total" + at + "} 1000\n"), std::string::npos) << found;
  EXPECT_NE(found.find("bps_rdma_port_events_total" + at + ",counter=\"out_of_sequence\"} 7\n"), std::string::npos)
      << found;
  EXPECT_EQ(found.find("lifespan"), std::string::npos);
  EXPECT_EQ(found.find("broken"), std::string::npos);
}

TEST_F(RdmaCounters, APortWithoutCountersSaysNothing) {
  EXPECT_EQ(text({}), "");
  EXPECT_EQ(text({{"mlx5_1", 1}}), "");
}

TEST(ProcessFamilies, AreThoseOfThisProcess) {
  for (const MetricFamily& family : process_families()) {
    ASSERT_EQ(family.samples.size(), 1U) << family.name;
    EXPECT_GT(family.samples[0].value, 0) << family.name;
    if (family.name != "process_start_time_seconds") continue;
    EXPECT_NEAR(family.samples[0].value, static_cast<double>(::time(nullptr)), 3600);
  }
  EXPECT_EQ(process_families().size(), 5U);
}

}  // namespace
}  // namespace bps::node
