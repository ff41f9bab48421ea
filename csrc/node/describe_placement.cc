// SPDX-License-Identifier: Apache-2.0
#include "node/describe_placement.h"

#include <algorithm>
#include <vector>

#include "core/json.h"
#include "van/hosts.h"
#include "van/server_weights.h"

namespace bps::node {
namespace {

using van::ServerWeights;

constexpr double kGbit = 1e9 / 8;  // bytes
constexpr double kGB = 1e9;
constexpr double kAsLong = 1 - 1e-6;  // leaves room for rounding

std::string to_json(const ServerWeights::Part& part, double most, bool knows_links) {
  JsonObject one;
  one.add("host", part.host).add("contributions", part.site.contributions).add("share", part.share);
  // This is how often a byte crosses the link, in each direction.
  one.add("crossings", part.busy.link * part.site.link);
  if (knows_links) {
    one.add("link_gbps", part.site.link / kGbit).add("link_s_per_gb", part.busy.link * kGB);
  }
  if (part.busy.sums > 0) one.add("sum_gbps", part.site.sums / kGbit).add("sum_s_per_gb", part.busy.sums * kGB);
  const char* limit = "";
  if (part.busy.sums > 0 && part.busy.sums >= most * kAsLong) limit = "sums";
  if (part.busy.link > 0 && part.busy.link >= most * kAsLong) limit = "link";
  return one.add("limit", std::string(limit)).end();
}

}  // namespace

std::string describe_placement(const van::Membership& members) {
  JsonObject placement;
  placement.add("setting", members.nodes.front().terms.placement);
  const auto weights = ServerWeights::of_job(members, van::Hosts(members));
  placement.add("in_turn", !weights);
  if (!weights) return placement.end();
  const std::vector<ServerWeights::Part> parts = weights->parts_of(members.all());
  double most = 0;
  for (const auto& part : parts) most = std::max({most, part.busy.link, part.busy.sums});
  JsonList hosts;
  for (const auto& part : parts) hosts.add_raw(to_json(part, most, weights->knows_links()));
  return placement.add_raw("hosts", hosts.end()).end();
}

}  // namespace bps::node
