// SPDX-License-Identifier: Apache-2.0
#include "node/near_gpu.h"

#include <gtest/gtest.h>

#include "core/error.h"

namespace bps::node {
namespace {

Settings with(std::map<std::string, std::string> variables) {
  variables.try_emplace("BPS_CUDA_LIB", BPS_FAKE_CUDA);
  return SettingValues([variables](const std::string& name) -> std::optional<std::string> {
           const auto found = variables.find(name);
           return found == variables.end() ? std::nullopt : std::optional<std::string>(found->second);
         })
      .parse();
}

std::string gpu_of(const std::map<std::string, std::string>& variables, bool may_choose = true) {
  return rdma_options(with(variables), may_choose).near_gpu;
}

TEST(NearGpu, IsNoneUnlessOneIsAskedFor) {
  EXPECT_EQ(gpu_of({}), "");
  EXPECT_EQ(gpu_of({{"BPS_DEVICE_ROUTE", "1"}}), "");
  EXPECT_EQ(gpu_of({{"BPS_RDMA_NEAR_GPU", "0"}}, false), "") << "of a server";
}

TEST(NearGpu, IsTheOneThatWasNamed) {
  EXPECT_EQ(gpu_of({{"BPS_RDMA_NEAR_GPU", "0"}}), "0000:1a:00.0");
  EXPECT_EQ(gpu_of({{"BPS_RDMA_NEAR_GPU", "0000:3b:00.0"}, {"BPS_CUDA_LIB", "libno-such.so"}}), "0000:3b:00.0")
      << "an address needs no driver";
  EXPECT_EQ(gpu_of({{"BPS_RDMA_NEAR_GPU", "00000000:3B:00.0"}}), "0000:3b:00.0") << "as nvidia-smi writes it";
}

TEST(NearGpu, DoesNotCountWhereDevicesWereListed) {
  EXPECT_EQ(gpu_of({{"BPS_RDMA_NEAR_GPU", "0"}, {"BPS_RDMA_HCA", "mlx5_1"}}), "");
  EXPECT_EQ(gpu_of({{"BPS_RDMA_NEAR_GPU", "0"}, {"BPS_RDMA_HCA", "^mlx5_1"}}), "0000:1a:00.0");
}

TEST(NearGpu, IsRefusedWhereItIsNone) {
  EXPECT_THROW((void)gpu_of({{"BPS_RDMA_NEAR_GPU", "near"}}), Error);
  EXPECT_THROW((void)gpu_of({{"BPS_RDMA_NEAR_GPU", "-1"}}), Error);
  EXPECT_THROW((void)gpu_of({{"BPS_RDMA_NEAR_GPU", "7"}}), Error);
  EXPECT_THROW((void)gpu_of({{"BPS_RDMA_NEAR_GPU", "0"}, {"BPS_CUDA_LIB", "libno-such.so"}}), Error);
}

// A rank of such a job may have arrays in CPU memory only.
TEST(NearGpu, IsNotNeeded) {
  EXPECT_EQ(gpu_of({{"BPS_RDMA_NEAR_GPU", "auto"}, {"BPS_CUDA_LIB", "libno-such.so"}}), "");
}

}  // namespace
}  // namespace bps::node
