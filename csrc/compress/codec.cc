// SPDX-License-Identifier: Apache-2.0
#include "compress/codec.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>

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

struct Added {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<const Codec>, std::less<>> codecs;
};
Added& added() {
  static Added& all = *new Added;  // never destroyed: loops may run until the process ends
  return all;
}

bool is_name(std::string_view text) {
  const auto fits = [](unsigned char c) { return std::islower(c) != 0 || std::isdigit(c) != 0 || c == '_'; };
  return !text.empty() && text.size() <= 32 && std::islower(static_cast<unsigned char>(text[0])) != 0 &&
         std::ranges::all_of(text, fits);
}

}  // namespace

void add_codec(std::string_view name, std::shared_ptr<const Codec> codec) {
  if (!is_name(name)) {
    throw Error(ErrorCode::kInvalidArgument, "'" + std::string(name) + "' is not a name for a compression method",
                "use at most 32 small letters, digits and underscores");
  }
  const std::lock_guard lock(added().mutex);  // a codec that has no place lives on: its end may run any code
  const auto is_it = [name](const Method& method) { return method.name == name; };
  if (std::ranges::any_of(kMethods, is_it) || !added().codecs.try_emplace(std::string(name), std::move(codec)).second) {
    throw Error(ErrorCode::kInvalidArgument, "there is a compression method '" + std::string(name) + "' already",
                "use another name");
  }
}

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
  const std::lock_guard lock(added().mutex);
  if (const auto found = added().codecs.find(name); found != added().codecs.end()) return found->second;
  for (const auto& [other, codec] : added().codecs) known += ", " + other;
  throw Error(ErrorCode::kInvalidArgument, "there is no compression method '" + std::string(name) + "'",
              "use one of " + known);
}

}  // namespace bps::compress
