// SPDX-License-Identifier: Apache-2.0
// What operations and tensors are made of, and the pure functions of placement, for tests and tools.
#include <pybind11/stl.h>

#include "core/dtype.h"
#include "python/bind.h"
#include "tensor/key_map.h"
#include "tensor/partition.h"
#include "worker/operation.h"

namespace py = pybind11;

namespace bps::python {

void bind_tensor(py::module_& module) {
  py::enum_<Dtype>(module, "Dtype")
      .value("float32", Dtype::kFloat32)
      .value("float64", Dtype::kFloat64)
      .value("float16", Dtype::kFloat16)
      .value("bfloat16", Dtype::kBfloat16)
      .value("uint8", Dtype::kUint8)
      .value("int8", Dtype::kInt8)
      .value("int32", Dtype::kInt32)
      .value("int64", Dtype::kInt64)
      .value("bool", Dtype::kBool);
  py::enum_<ReduceOp>(module, "ReduceOp")
      .value("sum", ReduceOp::kSum)
      .value("average", ReduceOp::kAverage)
      .value("min", ReduceOp::kMin)
      .value("max", ReduceOp::kMax)
      .value("product", ReduceOp::kProduct);  // exact ones follow from how a tensor was declared
  py::enum_<tensor::OperationKind>(module, "Kind")
      .value("push_pull", tensor::OperationKind::kPushPull)
      .value("reduce_scatter", tensor::OperationKind::kReduceScatter)
      .value("all_gather", tensor::OperationKind::kAllGather)
      .value("broadcast", tensor::OperationKind::kBroadcast)
      .value("split", tensor::OperationKind::kSplit)
      .value("store", tensor::OperationKind::kStore)
      .value("accumulate", tensor::OperationKind::kAccumulate)
      .value("read_feedback", tensor::OperationKind::kReadFeedback)
      .value("write_feedback", tensor::OperationKind::kWriteFeedback);

  module.def("make_key", &tensor::make_key, py::arg("tensor"), py::arg("partition"));
  module.def("djb2", &tensor::djb2, py::arg("key"));
  module.def("sdbm", &tensor::sdbm, py::arg("key"));
  module.def("naive", &tensor::naive, py::arg("key"));
  module.def(
      "server_of",
      [](const std::string& hash, std::uint32_t servers, std::uint32_t workers, std::uint32_t tensor,
         std::uint64_t partition) {
        tensor::KeyMapConfig config;
        config.hash = tensor::parse_key_hash(hash);
        config.servers = servers;
        config.workers = workers;
        return tensor::server_of(config, tensor, partition);
      },
      py::arg("hash"), py::arg("servers"), py::arg("workers"), py::arg("tensor"), py::arg("partition"));
}

}  // namespace bps::python
