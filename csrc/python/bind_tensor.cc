// SPDX-License-Identifier: Apache-2.0
// Binds the parts of operations and tensors, and the pure functions of placement, for tests and tools.
#include <pybind11/stl.h>

#include "core/dtype.h"
#include "python/bind.h"
#include "tensor/key_map.h"
#include "tensor/partition.h"
#include "van/link_shares.h"
#include "worker/pace.h"

namespace py = pybind11;

namespace bps::python {
namespace {

using SiteTuple = std::tuple<double, double, std::uint32_t>;  // link, sums, contributions

std::vector<van::Site> sites_of(const std::vector<SiteTuple>& sites) {
  std::vector<van::Site> all;
  for (const auto& [link, sums, contributions] : sites) all.push_back({link, sums, contributions});
  return all;
}

}  // namespace

void bind_tensor(py::module_& module) {
  bind_enum<Dtype>(module, "Dtype",
                   {
                       {"float32", Dtype::kFloat32},
                       {"float64", Dtype::kFloat64},
                       {"float16", Dtype::kFloat16},
                       {"bfloat16", Dtype::kBfloat16},
                       {"uint8", Dtype::kUint8},
                       {"int8", Dtype::kInt8},
                       {"int32", Dtype::kInt32},
                       {"int64", Dtype::kInt64},
                       {"bool", Dtype::kBool},
                   });
  // Exact sums have no member: they follow from how a tensor was declared.
  bind_enum<ReduceOp>(module, "ReduceOp",
                      {
                          {"sum", ReduceOp::kSum},
                          {"average", ReduceOp::kAverage},
                          {"min", ReduceOp::kMin},
                          {"max", ReduceOp::kMax},
                          {"product", ReduceOp::kProduct},
                      });
  bind_enum<tensor::OperationKind>(module, "Kind",
                                   {
                                       {"push_pull", tensor::OperationKind::kPushPull},
                                       {"reduce_scatter", tensor::OperationKind::kReduceScatter},
                                       {"all_gather", tensor::OperationKind::kAllGather},
                                       {"broadcast", tensor::OperationKind::kBroadcast},
                                       {"split", tensor::OperationKind::kSplit},
                                       {"store", tensor::OperationKind::kStore},
                                       {"accumulate", tensor::OperationKind::kAccumulate},
                                       {"read_feedback", tensor::OperationKind::kReadFeedback},
                                       {"write_feedback", tensor::OperationKind::kWriteFeedback},
                                   });

  module.def(
      "deal_slots", [](const std::vector<std::uint32_t>& weights) { return tensor::deal_slots(weights); },
      py::arg("weights"));
  module.def(
      "link_shares", [](const std::vector<SiteTuple>& sites) { return van::link_shares(sites_of(sites)); },
      py::arg("sites"));
  module.def(
      "seconds_per_byte",
      [](const std::vector<SiteTuple>& sites, const std::vector<double>& shares) {
        return van::seconds_per_byte(sites_of(sites), shares);
      },
      py::arg("sites"), py::arg("shares"));
  module.def("partition_size", &tensor::partition_size, py::arg("bytes"), py::arg("limit"), py::arg("loops"),
             py::arg("floor"));
  module.def("partition_for_link", &tensor::partition_for_link, py::arg("bytes_per_s"));
  module.def("pace_of", &worker::Pace::each_of, py::arg("partition_bytes"));
}

}  // namespace bps::python
