// SPDX-License-Identifier: Apache-2.0
#include "van/link_shares.h"

#include <algorithm>
#include <numeric>

namespace bps::van {
namespace {

constexpr double kUnlimited = std::numeric_limits<double>::infinity();
constexpr int kHalvings = 200;     // far more than a double has bits
constexpr double kNothing = 1e-9;  // so much of all bytes is what rounding leaves

class Loads {
 public:
  explicit Loads(std::span<const Site> sites) : sites_(sites) {
    for (const Site& site : sites) all_ += site.contributions;
  }

  // Returns the bytes that each byte of the tensor puts on the site's link.
  double load(const Site& site, double share) const {
    return site.contributions + (all_ - 2.0 * site.contributions) * share;
  }
  Busy busy(const Site& site, double share) const {
    return {.link = load(site, share) / site.link, .sums = share > 0 ? all_ * share / site.sums : 0};
  }
  // Returns the largest share with which the site keeps within `seconds` for each byte; negative if it cannot.
  double most(const Site& site, double seconds) const {
    const double summed = site.sums == kUnlimited ? 1 : std::min(1.0, seconds * site.sums / all_);
    const double slope = all_ - 2.0 * site.contributions;
    const double room = seconds * site.link - site.contributions;
    if (slope > 0) return room < 0 ? -1 : std::min(summed, room / slope);
    return load(site, summed) <= seconds * site.link ? summed : -1;
  }
  // Returns the least share: a host with more than half of all contributions sends less the more it sums itself.
  double least(const Site& site, double seconds) const {
    const double slope = all_ - 2.0 * site.contributions;
    const double room = seconds * site.link - site.contributions;
    return slope < 0 && room < 0 ? room / slope : 0;
  }
  bool is_enough(double seconds) const {
    double sum = 0;
    for (const Site& site : sites_) {
      const double share = most(site, seconds);
      if (share < 0) return false;
      sum += share;
    }
    return sum >= 1;
  }
  double least_seconds() const {
    double high = 0;
    for (const Site& site : sites_) high = std::max(high, (all_ + 1) / site.link);
    if (is_enough(0)) return 0;
    while (!is_enough(high)) high *= 2;
    double low = 0;
    for (int i = 0; i < kHalvings && low < high; ++i) {
      const double middle = low + (high - low) / 2;
      (is_enough(middle) ? high : low) = middle;
      if (middle == low && middle == high) break;
    }
    return high;
  }

 private:
  const std::span<const Site> sites_;
  double all_ = 0;
};

// Gives out `rest` in proportion to the room that is left on the chosen sites.
template <typename Chosen>
void fill(std::span<const Site> sites, std::span<const double> most, std::vector<double>& shares, double& rest,
          Chosen is_chosen) {
  double room = 0;
  for (std::size_t i = 0; i < sites.size(); ++i) room += is_chosen(sites[i]) ? most[i] - shares[i] : 0;
  if (room <= 0 || rest <= kNothing) return;
  const double part = std::min(1.0, rest / room);
  for (std::size_t i = 0; i < sites.size(); ++i) {
    if (is_chosen(sites[i])) shares[i] += (most[i] - shares[i]) * part;
  }
  rest -= room * part;
}

}  // namespace

std::vector<double> link_shares(std::span<const Site> sites) {
  std::vector<double> shares(sites.size());
  if (std::ranges::none_of(sites, [](const Site& site) { return site.sums > 0; })) return shares;
  const Loads loads(sites);
  const double seconds = loads.least_seconds();
  std::vector<double> most;
  for (std::size_t i = 0; i < sites.size(); ++i) {
    most.push_back(std::max(loads.most(sites[i], seconds), 0.0));
    shares[i] = loads.least(sites[i], seconds);
  }
  double rest = 1 - std::accumulate(shares.begin(), shares.end(), 0.0);
  fill(sites, most, shares, rest, [](const Site& site) { return site.contributions == 0; });
  fill(sites, most, shares, rest, [](const Site& site) { return site.contributions > 0; });
  return shares;
}

std::vector<Busy> busy_per_byte(std::span<const Site> sites, std::span<const double> shares) {
  const Loads loads(sites);
  std::vector<Busy> busy;
  for (std::size_t i = 0; i < sites.size(); ++i) busy.push_back(loads.busy(sites[i], shares[i]));
  return busy;
}

double seconds_per_byte(std::span<const Site> sites, std::span<const double> shares) {
  double most = 0;
  for (const Busy& busy : busy_per_byte(sites, shares)) most = std::max({most, busy.link, busy.sums});
  return most;
}

}  // namespace bps::van
