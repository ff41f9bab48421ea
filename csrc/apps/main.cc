// SPDX-License-Identifier: Apache-2.0
// Starts bps-server or bps-scheduler, as BPS_APP says. The rest of them is compiled with what they use.
namespace bps::apps::BPS_APP {
int run(int argc, char** argv);
}

int main(int argc, char** argv) {
  return bps::apps::BPS_APP::run(argc, argv);
}
