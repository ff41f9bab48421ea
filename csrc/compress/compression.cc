// SPDX-License-Identifier: Apache-2.0
#include "compress/compression.h"

#include "compress/label.h"
#include "core/error.h"

namespace bps::compress {

std::shared_ptr<const Compression> parse_compression(std::string_view text) {
  if (text.size() > kMostText) {
    throw Error(ErrorCode::kInvalidArgument, "compression: '" + std::string(text.substr(0, 80)) + "' is too long",
                "use at most " + std::to_string(kMostText) + " characters");
  }
  const std::size_t colon = text.find(':');
  const std::string_view method = text.substr(0, colon);
  Parameters parameters(colon == std::string_view::npos ? std::string_view() : text.substr(colon + 1));
  auto compression = std::make_shared<Compression>();
  compression->text = text;
  compression->codec = make_codec(method, parameters);
  compression->feedback = parameters.take_flag("feedback", false);
  compression->momentum = static_cast<float>(parameters.take_number("momentum", 0, 0, 1));
  // With momentum, contributions to servers of the own host would otherwise weigh less than all others.
  compression->everywhere = parameters.take_flag("everywhere", false) || compression->momentum != 0;
  compression->seed = parameters.take_integer("seed", 0, 0, UINT64_MAX);
  parameters.end(method);
  return compression;
}

}  // namespace bps::compress
