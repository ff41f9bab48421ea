// SPDX-License-Identifier: Apache-2.0
// Describes a group as a server loop sees it: who contributes to its rounds.
#pragma once

#include "van/hosts.h"

namespace bps::server {

// Names the host and the server of this loop.
struct Location {
  std::uint32_t host = van::Hosts::kNoHost;
  std::uint32_t server_rank = 0;  // if the process is a server
};

struct RoundGroup {
  RoundGroup(const van::Group& members, const van::Hosts& hosts, const Location& here)
      : group(members), network(van::Contributors::by_host(members, hosts)) {
    if (!hosts.active() || here.host == van::Hosts::kNoHost) return;
    host = van::Contributors::on_host(members, hosts, here.host);
    ends_on_host = host.size() == members.size();
    if (host.size() > 0) host_contributor = network.of_position(host[0].positions.front());
  }

  const van::Contributors& contributors(bool for_host) const { return for_host ? host : network; }

  van::Group group;
  van::Contributors network;           // to rounds that are summed here for all
  van::Contributors host;              // to rounds that are summed here for this host
  bool ends_on_host = false;           // the group has no ranks but those in `host`
  std::uint32_t host_contributor = 0;  // the index of this host in `network`
};

}  // namespace bps::server
