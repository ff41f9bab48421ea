// SPDX-License-Identifier: Apache-2.0
#include "compress/codec.h"

#include <string>
#include <type_traits>

#include "compress/dithering.h"
#include "compress/float8.h"
#include "compress/half.h"
#include "compress/int4_blocks.h"
#include "compress/int8_blocks.h"
#include "compress/onebit.h"
#include "compress/sparse.h"
#include "core/error.h"

namespace bps::compress {
namespace {

using Make = std::shared_ptr<const Codec> (*)(Parameters&);

template <typename Method>
std::shared_ptr<const Codec> make([[maybe_unused]] Parameters& parameters) {
  if constexpr (std::is_constructible_v<Method, Parameters&>) {
    return std::make_shared<const Method>(parameters);
  } else {
    return std::make_shared<const Method>();
  }
}

struct Method {
  std::string_view name;
  Make make;
};

constexpr Method kMethods[] = {
    {"bf16", make<Bfloat16Codec>},       {"fp16", make<Float16Codec>},    {"mxfp8", make<Mxfp8Codec>},
    {"fp8", make<Fp8RowsCodec>},         {"int8", make<Int8BlocksCodec>}, {"int4", make<Int4BlocksCodec>},
    {"onebit", make<OnebitCodec>},       {"topk", make<TopkCodec>},       {"randomk", make<RandomkCodec>},
    {"dithering", make<DitheringCodec>},
};

}  // namespace

std::vector<std::string_view> codec_names() {
  std::vector<std::string_view> names;
  for (const Method& method : kMethods) names.push_back(method.name);
  return names;
}

std::shared_ptr<const Codec> make_codec(std::string_view name, Parameters& parameters) {
  std::string known;
  for (const Method& method : kMethods) {
    if (method.name == name) return method.make(parameters);
    known += (known.empty() ? "" : ", ") + std::string(method.name);
  }
  throw Error(ErrorCode::kInvalidArgument, "there is no compression method '" + std::string(name) + "'",
              "use one of " + known);
}

}  // namespace bps::compress
