// SPDX-License-Identifier: Apache-2.0
// The watch in a closed loop: what it finds gives servers other weights, which change what it sees next.
#include "van/link_watch.h"

#include <gtest/gtest.h>

#include <random>

#include "van/link_shares.h"

namespace bps::van {
namespace {

constexpr double kGigabit = 125e6;
constexpr double kTensor = 100e6;

// Hosts with one worker or none, each with a server; each pushes and pulls one tensor after the other.
class Cluster {
 public:
  // `nominal`: what members say of their links. 0: they do not know.
  Cluster(std::vector<double> links, std::size_t workers, double nominal = kGigabit, std::uint32_t seed = 1)
      : random_(seed),
        links_(std::move(links)),
        workers_(workers),
        said_(links_.size(), nominal),
        watch_(membership()) {
    for (const double link : said_) used_.push_back(static_cast<std::uint64_t>(std::max(link, 1.0)));
  }

  void change(std::size_t host, double link) { links_[host] = link; }
  // What this link carries comes in bursts, for which it seems so many times as fast while it has no more to do than it
  // can: as behind a queue, or where a bucket of tokens limits it.
  void let_burst(std::size_t host, double times) {
    bursts_ = host;
    burst_ = times;
  }
  // A server whose share is below this gets nothing.
  void deal_pieces_of(double share) { piece_ = share; }
  // True when the watch has asked for other weights. It gets them.
  bool run_for_a_second() {
    const std::vector<double> shares = shares_of(std::vector<double>(used_.begin(), used_.end()));
    const double seconds = time_with(shares);
    const auto rounds = std::max(1.0, std::floor(1 / seconds));
    for (std::size_t i = 0; i < links_.size(); ++i) {
      LinkUse use;
      for (std::size_t j = 0; j < links_.size(); ++j) {
        const double bytes = ((i < workers_ ? shares[j] : 0) + (j < workers_ ? shares[i] : 0)) * kTensor;
        if (i == j || bytes == 0) continue;
        // A flow is under way while the busier one of its links is, and a little longer or shorter.
        double busy = std::max(load(shares, i) / links_[i], load(shares, j) / links_[j]) * noise_(random_);
        if ((i == bursts_ || j == bursts_) && static_cast<double>(used_[bursts_]) < 1.2 * links_[bursts_])
          busy /= burst_;
        use.peers.push_back({static_cast<std::uint32_t>(j + 1), static_cast<std::uint64_t>(bytes * rounds),
                             static_cast<std::uint64_t>(1e6 * busy * rounds)});
      }
      EXPECT_TRUE(watch_.take(static_cast<std::uint32_t>(i + 1), use));
    }
    const auto found = watch_.look(true);
    if (!found) return false;
    used_ = *found;
    watch_.adopt(used_);
    return true;
  }
  int changes_in(int seconds) {
    int changes = 0;
    mean_goodput_ = 0;
    for (int i = 0; i < seconds; ++i) {
      mean_goodput_ += goodput() / seconds;
      changes += run_for_a_second();
    }
    return changes;
  }
  // Of the time that was asked for last.
  double mean_goodput() const { return mean_goodput_; }
  // How fast it is, compared with the best weights for the links as they are.
  double goodput() const {
    return time_with(shares_of(links_)) / time_with(shares_of(std::vector<double>(used_.begin(), used_.end())));
  }
  std::vector<LinkWatch::Slow> slow() const { return watch_.slow(); }
  LinkWatch& watch() { return watch_; }

 private:
  Membership membership() const {
    Membership members;
    members.workers = static_cast<std::uint32_t>(workers_);
    members.servers = static_cast<std::uint32_t>(links_.size());
    for (std::uint32_t i = 0; i < links_.size(); ++i) {
      Node node;
      node.id = i + 1;
      node.worker_rank = i < workers_ ? static_cast<std::int32_t>(i) : kNoRank;
      node.server_rank = static_cast<std::int32_t>(i);
      node.host = node.host_key = "host " + std::to_string(i);
      node.link = static_cast<std::uint64_t>(said_[i]);
      members.nodes.push_back(node);
    }
    return members;
  }
  std::vector<double> shares_of(const std::vector<double>& links) const {
    std::vector<Site> sites;
    for (std::size_t i = 0; i < links.size(); ++i) sites.push_back({.link = links[i], .contributions = i < workers_});
    std::vector<double> shares = link_shares(sites);
    for (double& share : shares) share = share < piece_ ? 0 : share;
    return shares;
  }
  double load(const std::vector<double>& shares, std::size_t host) const {
    const auto n = static_cast<double>(workers_);
    return kTensor * (host < workers_ ? 1 + (n - 2) * shares[host] : n * shares[host]);
  }
  double time_with(const std::vector<double>& shares) const {
    double longest = 0;
    for (std::size_t i = 0; i < links_.size(); ++i) longest = std::max(longest, load(shares, i) / links_[i]);
    return longest;
  }

  double piece_ = 0;
  std::size_t bursts_ = ~std::size_t{0};
  double burst_ = 1;
  std::minstd_rand random_;
  std::vector<double> links_;  // as they are
  const std::size_t workers_;
  const std::vector<double> said_;
  std::vector<std::uint64_t> used_;
  LinkWatch watch_;
  double mean_goodput_ = 0;
  std::uniform_real_distribution<double> noise_{0.7, 1.2};
};

TEST(LinkWatch, LeavesGoodLinksAlone) {
  for (const double nominal : {kGigabit, 0.0, 10 * kGigabit, kGigabit / 10}) {
    for (const std::size_t workers : {3, 4, 8}) {
      Cluster cluster(std::vector<double>(workers + 2, kGigabit), workers, nominal);
      EXPECT_EQ(cluster.changes_in(100), 0) << nominal << ", " << workers;
    }
  }
}

struct Case {
  std::string name;
  std::size_t workers, spares;
  std::vector<std::size_t> slow;
  double factor;
};

class Drop : public testing::TestWithParam<Case> {};

TEST_P(Drop, IsFollowedAndForgotten) {
  const Case& drop = GetParam();
  for (std::uint32_t seed = 0; seed < 6; ++seed) {
    const double nominal = seed % 2 == 0 ? kGigabit : 0;
    Cluster cluster(std::vector<double>(drop.workers + drop.spares, kGigabit), drop.workers, nominal, seed);
    EXPECT_EQ(cluster.changes_in(10), 0);
    for (const std::size_t host : drop.slow) cluster.change(host, kGigabit * drop.factor);
    const double before = cluster.goodput();
    EXPECT_GE(cluster.changes_in(8), 1);
    EXPECT_GE(cluster.goodput(), std::max(0.75, before));
    EXPECT_GE(cluster.slow().size(), 1U);
    cluster.changes_in(60);
    EXPECT_LE(cluster.changes_in(300), 16 * static_cast<int>(drop.slow.size())) << "it tries less and less often";
    EXPECT_GE(cluster.mean_goodput(), 0.85);
    for (const std::size_t host : drop.slow) cluster.change(host, kGigabit);
    EXPECT_GE(cluster.changes_in(400), 1);
    EXPECT_GE(cluster.goodput(), 0.85);
    EXPECT_EQ(cluster.changes_in(50), 0);
    EXPECT_TRUE(cluster.slow().empty() || nominal == 0);
  }
}

INSTANTIATE_TEST_SUITE_P(LinkWatch, Drop,
                         testing::Values(Case{"Spare", 4, 1, {4}, 0.25}, Case{"OneOfTwoSpares", 4, 2, {5}, 0.25},
                                         Case{"WorkerHost", 4, 0, {2}, 0.5}, Case{"WorkerHostMuch", 4, 1, {0}, 0.25},
                                         Case{"TwoSpares", 6, 3, {6, 8}, 0.2}, Case{"OfThree", 3, 1, {3}, 0.1},
                                         Case{"Large", 32, 8, {3, 35}, 0.25}),
                         [](const auto& one) { return one.param.name; });

TEST(LinkWatch, ALinkThatOnlySeemsFastIsTriedLessAndLessOften) {
  Cluster cluster(std::vector<double>(5, kGigabit), 4);
  cluster.change(4, kGigabit / 4);
  cluster.let_burst(4, 6);
  EXPECT_GE(cluster.changes_in(100), 3);
  EXPECT_LE(cluster.changes_in(300), 16);
  cluster.change(4, kGigabit);
  EXPECT_GE(cluster.changes_in(60), 1);
  EXPECT_GE(cluster.goodput(), 0.85);
}

TEST(LinkWatch, ASlowLinkWithLittleOrNothingToDoIsTriedAgain) {
  for (const double piece : {0.0, 1.0 / 64}) {
    Cluster cluster(std::vector<double>(5, kGigabit), 4);
    cluster.deal_pieces_of(piece);
    cluster.change(4, kGigabit / 5000);
    cluster.changes_in(400);
    ASSERT_EQ(cluster.slow().size(), 1U);
    EXPECT_LE(cluster.changes_in(320), 16) << "it tries less and less often";
    EXPECT_GE(cluster.mean_goodput(), 0.85);
    cluster.change(4, kGigabit);
    cluster.changes_in(600);
    EXPECT_GE(cluster.goodput(), 0.85);
    EXPECT_EQ(cluster.slow().size(), 0U);
  }
}

TEST(LinkWatch, IgnoresWhatTakesNoTime) {
  Cluster cluster({1000 * kGigabit, 1000 * kGigabit, 1000 * kGigabit, 100 * kGigabit}, 3);
  Membership members;
  EXPECT_EQ(cluster.watch().look(true), std::nullopt) << "nothing was told";
}

TEST(LinkWatch, TakesNothingThatNoMemberSays) {
  Cluster cluster({kGigabit, kGigabit, kGigabit}, 3);
  EXPECT_FALSE(cluster.watch().take(1, {{{9, 1, 1}}}));
  EXPECT_FALSE(cluster.watch().take(1, {{{0, 1, 1}}}));
  EXPECT_TRUE(cluster.watch().take(1, {{{2, 100, 100}}}));
}

}  // namespace
}  // namespace bps::van
