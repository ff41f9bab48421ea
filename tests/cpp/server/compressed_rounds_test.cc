// SPDX-License-Identifier: Apache-2.0
// Rounds whose payloads come compressed.
#include "compress/elements.h"
#include "server/round_engine_fixture.h"

namespace bps::server {
namespace {

constexpr std::uint8_t kPlain = kPush | kPull;
constexpr std::uint8_t kCompressed = kPlain | tensor::kCompressed;
constexpr std::size_t kFloats = kBytes / sizeof(float);

class CompressedRoundsTest : public RoundEngineTest {
 protected:
  CompressedRoundsTest() { use_slots(2); }

  // What a worker of this value sends: label and code.
  std::vector<std::byte> payload(float value, const std::string& text) const {
    const auto compression = compress::parse_compression(text);
    const std::vector<float> values(kFloats, value);
    const compress::Label label = compress::make_label(text);
    std::vector<std::byte> bytes(label.begin(), label.end());
    bytes.resize(compress::kLabelBytes + compression->codec->encoded_size(kFloats));
    compression->codec->encode(values, std::span(bytes).subspan(compress::kLabelBytes), 0);
    return bytes;
  }
  void land_bytes(std::uint32_t worker, const tensor::PushHeader& what, const std::vector<std::byte>& bytes) {
    const std::uint32_t number = slots[worker].back();
    slots[worker].pop_back();
    Slot* slot = pool.by_number(number);
    std::memcpy(slot->data, &what, sizeof what);
    std::memcpy(slot->payload(), bytes.data(), bytes.size());
    sessions[worker]->on_write(data(worker), number, sizeof what + bytes.size());
  }
  void land(std::uint32_t worker, const std::string& text = "int8", std::uint32_t round = 0) {
    land_bytes(worker, header(worker, kCompressed, round), payload(memory[worker][0], text));
  }
  std::vector<float> decoded(const transport::WriteOp& answer, const std::string& text = "int8") const {
    std::vector<float> values(kFloats);
    const auto code = answer.source->bytes().subspan(answer.source_offset, answer.length);
    EXPECT_EQ(compress::parse_compression(text)->codec->decode(code, values, compress::Into::kReplace),
              compress::Decoded::kOk);
    return values;
  }
};

TEST_F(CompressedRoundsTest, AnswersAreTheCodeOfTheSum) {
  for (std::uint32_t i = 0; i < kWorkers; ++i) land(i);
  for (std::uint32_t i = 0; i < kWorkers; ++i) {
    const transport::WriteOp& answer = data(i).writes.at(0);
    EXPECT_EQ(answer.length, kFloats + (kFloats + 255) / 256 * 4);
    EXPECT_EQ(answer.target.length, answer.length);
    EXPECT_NEAR(decoded(answer)[kFloats - 1], 6, 0.05);
    engine.on_written(answer.token);
  }
  EXPECT_EQ(engine.open_rounds(), 0U);
  collect_credits(0);
  EXPECT_EQ(slots[0].size(), 2U) << "the slot that held the result is free again";
}

// What travels of 16-bit floats is the code of the same values in float32, and so is the answer.
class CompressedHalvesTest : public CompressedRoundsTest, public ::testing::WithParamInterface<Dtype> {
 protected:
  tensor::PushHeader of_halves(std::uint32_t worker, std::uint8_t flags, ReduceOp op = ReduceOp::kSum) {
    tensor::PushHeader made = header(worker, flags);
    made.dtype = GetParam();
    made.op = op;
    made.length = static_cast<std::uint32_t>(kFloats * size_of(made.dtype));
    return made;
  }
  void land_halves(std::uint32_t worker, ReduceOp op = ReduceOp::kSum) {
    land_bytes(worker, of_halves(worker, kCompressed, op), payload(memory[worker][0], "int8"));
  }
};

TEST_P(CompressedHalvesTest, AreSummedAsFloat32) {
  for (std::uint32_t i = 0; i < kWorkers; ++i) land(i);
  const std::vector<float> of_floats = decoded(data(0).writes.at(0));
  for (std::uint32_t i = 0; i < kWorkers; ++i) {
    engine.on_written(data(i).writes.at(0).token);
    collect_credits(i);
    tensor::PushHeader next = of_halves(i, kCompressed);
    next.round = 1;
    land_bytes(i, next, payload(memory[i][0], "int8"));
  }
  ASSERT_EQ(data(0).writes.size(), 2U);
  EXPECT_EQ(data(0).writes[1].length, data(0).writes[0].length);
  EXPECT_EQ(decoded(data(0).writes[1]), of_floats);
}

TEST_P(CompressedHalvesTest, AMemberOfThisHostGetsTheResultRoundedOnce) {
  const Dtype dtype = GetParam();
  data(0).put_on_same_host();
  std::vector<float> mine(kFloats, 0.1F);
  mine[0] = 0.37F;
  compress::narrow(dtype, mine, reinterpret_cast<std::byte*>(memory[0].data()));
  transport::RemoteSpan span{.key = 0, .address = reinterpret_cast<std::uint64_t>(memory[0].data())};
  span.length = kFloats * size_of(dtype);
  const tensor::PushHeader plain = of_halves(0, kPlain, ReduceOp::kAverage);
  sessions[0]->on_posting(data(0), tensor::bytes_of(plain), span);
  land_halves(1, ReduceOp::kAverage);
  land_halves(2, ReduceOp::kAverage);
  const std::vector<float> result = decoded(data(1).writes.at(0));
  EXPECT_NEAR(result[1], (0.1F + 2 + 3) / 3, 0.01);
  std::vector<std::byte> rounded(span.length);
  compress::narrow(dtype, result, rounded.data());
  EXPECT_EQ(std::memcmp(memory[0].data(), rounded.data(), rounded.size()), 0);
}

TEST_P(CompressedHalvesTest, RanksThatMixThemWithFloatsDisagree) {
  land(0);
  land_halves(1);
  ASSERT_EQ(failures(1).size(), 1U);
  EXPECT_EQ(failures(1)[0].code, ErrorCode::kMismatch);
}

INSTANTIATE_TEST_SUITE_P(Halves, CompressedHalvesTest, ::testing::Values(Dtype::kBfloat16, Dtype::kFloat16),
                         [](const auto& tested) { return std::string(to_string(tested.param)); });

// A push of some hundred bytes is not worth a gigabyte of work.
TEST_F(CompressedRoundsTest, APayloadThatStandsForFarMoreThanItSendsIsRefused) {
  tensor::PushHeader large = header(0, kCompressed);
  large.length = 8 << 20;
  const auto compression = compress::parse_compression("topk:k=1");
  const compress::Label label = compress::make_label("topk:k=1");
  std::vector<std::byte> bytes(label.begin(), label.end());
  bytes.resize(compress::kLabelBytes + compression->codec->encoded_size(large.length / sizeof(float)));
  land_bytes(0, large, bytes);
  ASSERT_EQ(failures(0).size(), 1U);
  EXPECT_NE(failures(0)[0].what.find("stands for far more than it sends"), std::string::npos) << failures(0)[0].what;
  EXPECT_EQ(engine.open_rounds(), 0U);
}

TEST_F(CompressedRoundsTest, AMemberOfThisHostGetsWhatTheCodeSays) {
  data(0).put_on_same_host();
  for (float& value : memory[0]) value = 0.1F;
  memory[0][0] = 0.37F;
  post(0, header(0, kPlain));
  land(1);
  land(2);
  const std::vector<float> result = decoded(data(1).writes.at(0));
  EXPECT_NE(result[1], 0.1F + 2 + 3) << "the code rounds";
  EXPECT_EQ(memory[0], result);
  EXPECT_EQ(decoded(data(2).writes.at(0)), result);
}

TEST_F(CompressedRoundsTest, WhatTheLastResultLostComesWithTheNextOne) {
  const std::string text = "int8:feedback=1";
  memory[0].assign(kFloats, 0.001F);
  double total = 0;
  for (std::uint32_t round = 0; round < 20; ++round) {
    for (std::uint32_t i = 0; i < kWorkers; ++i) {
      std::vector<std::byte> bytes = payload(0, text);
      auto* block = reinterpret_cast<std::uint8_t*>(bytes.data() + compress::kLabelBytes);
      const float scale = 0.01F;
      std::memcpy(block, &scale, sizeof scale);
      block[4] = i == 0 ? 1 : 0;    // 0.01 in all
      block[5] = i == 0 ? 127 : 0;  // whose code is the unit of that of the sum
      land_bytes(i, header(i, kCompressed, round), bytes);
    }
    total += decoded(data(1).writes.at(round), text)[0];
    for (std::uint32_t i = 0; i < kWorkers; ++i) engine.on_written(data(i).writes.at(round).token);
    for (std::uint32_t i = 0; i < kWorkers; ++i) collect_credits(i);
  }
  EXPECT_NEAR(total, 20 * 0.01, 0.011) << "within one residual";
}

// As the workers do: what an operation lost that nobody has seen is no error to make up for.
TEST_F(CompressedRoundsTest, AfterAFailureNothingIsMadeUpFor) {
  const std::string text = "int8:feedback=1";
  const auto land_all = [&](std::uint32_t round, float small) {
    for (std::uint32_t i = 0; i < kWorkers; ++i) {
      std::vector<std::byte> bytes = payload(0, text);
      auto* block = reinterpret_cast<std::uint8_t*>(bytes.data() + compress::kLabelBytes);
      std::memcpy(block, &small, sizeof small);
      block[4] = i == 0 ? 1 : 0;
      block[5] = i == 0 ? 127 : 0;
      if (i == 1) block[5] = 60;  // the sum's scale is another one, so that something is lost
      land_bytes(i, header(i, kCompressed, round), bytes);
    }
  };
  const auto answer_of = [&](std::uint32_t round) {
    const auto found = decoded(data(1).writes.at(data(1).writes.size() - 1), text);
    for (std::uint32_t i = 0; i < kWorkers; ++i) engine.on_written(data(i).writes.back().token);
    for (std::uint32_t i = 0; i < kWorkers; ++i) collect_credits(i);
    static_cast<void>(round);
    return found;
  };
  land_all(0, 0.01F);
  const std::vector<float> first = answer_of(0);
  land(0, text, 1);
  tensor::Cancel cancel;
  cancel.tensor = 11;
  cancel.round = 1;
  cancel.code = ErrorCode::kTimeout;
  cancel.what = "rank 0 gave up";
  cancel.partitions = {{header(0, kCompressed, 1).immediate, 0, 0}};
  engine.cancel(*sessions[0], cancel);
  for (std::uint32_t i = 0; i < kWorkers; ++i) collect_credits(i);
  for (std::uint32_t i = 1; i < kWorkers; ++i) land(i, text, 1);
  for (std::uint32_t i = 0; i < kWorkers; ++i) collect_credits(i);
  land_all(2, 0.01F);
  EXPECT_EQ(answer_of(2), first) << "as if it were the first round";
}

TEST_F(CompressedRoundsTest, WhatItFeedsBackCanBeReadAndReplaced) {
  std::uint32_t round = 0;
  // What everybody gets when worker i pushes its number.
  const auto feedback = [&](tensor::OperationKind kind) {
    std::vector<float> found;
    for (std::uint32_t i = 0; i < kWorkers; ++i) {
      tensor::PushHeader push = header(i, kPlain, round);
      push.kind = kind;
      RoundEngineTest::land(i, push);
    }
    for (std::uint32_t i = 0; i < kWorkers; ++i) {
      const transport::WriteOp& answer = data(i).writes.back();
      EXPECT_EQ(answer.length, kBytes);
      found.push_back(sum_in_slot(answer));
      engine.on_written(answer.token);
      collect_credits(i);
    }
    ++round;
    EXPECT_EQ(found[1], found[0]);
    EXPECT_EQ(found[2], found[0]);
    return found[0];
  };
  using Kind = tensor::OperationKind;
  EXPECT_EQ(feedback(Kind::kReadFeedback), 0) << "there has been no round";
  for (std::uint32_t i = 0; i < kWorkers; ++i) {
    land_bytes(i, header(i, kCompressed, round), payload(memory[i][0] / 1000, "onebit:feedback=1"));
  }
  const float sent = decoded(data(0).writes.back(), "onebit:feedback=1")[0];
  for (std::uint32_t i = 0; i < kWorkers; ++i) engine.on_written(data(i).writes.back().token);
  for (std::uint32_t i = 0; i < kWorkers; ++i) collect_credits(i);
  ++round;
  EXPECT_NEAR(feedback(Kind::kReadFeedback), 0.006F - sent, 1e-6);
  EXPECT_EQ(feedback(Kind::kWriteFeedback), 6) << "the sum of what was pushed";
  EXPECT_EQ(feedback(Kind::kReadFeedback), 6);
  EXPECT_EQ(feedback(Kind::kReadFeedback), 6) << "reading changes nothing";
  EXPECT_EQ(engine.open_rounds(), 0U);
}

TEST_F(CompressedRoundsTest, MembersMustCompressAlike) {
  land(0, "int8");
  land(1, "bf16");
  ASSERT_EQ(failures(1).size(), 1U);
  EXPECT_EQ(failures(1)[0].code, ErrorCode::kMismatch);
  ASSERT_EQ(failures(0).size(), 1U);
  EXPECT_EQ(failures(0)[0].code, ErrorCode::kMismatch);
}

TEST_F(CompressedRoundsTest, WhoSendsOverTheNetworkAsItIsDisagrees) {
  land(0);
  RoundEngineTest::land(1, header(1, kPlain));
  land(2);
  for (std::uint32_t i = 0; i < kWorkers; ++i) {
    ASSERT_EQ(failures(i).size(), 1U) << i;
    EXPECT_EQ(failures(i)[0].code, ErrorCode::kMismatch);
    EXPECT_TRUE(data(i).writes.empty());
  }
  EXPECT_EQ(engine.open_rounds(), 0U);
}

TEST_F(CompressedRoundsTest, RefusesLabelsThatMeanNothing) {
  std::vector<std::byte> bytes = payload(1, "int8");
  for (const char* text : {"", "zip", "int8:k=2"}) {
    const compress::Label label = compress::make_label(text);
    std::copy(label.begin(), label.end(), bytes.begin());
    land_bytes(0, header(0, kCompressed), bytes);
    ASSERT_EQ(failures(0).size(), 1U) << text;
    EXPECT_NE(failures(0)[0].what.find("not what its flags say"), std::string::npos);
    collect_credits(0);
  }
  EXPECT_EQ(engine.open_rounds(), 0U);
}

TEST_F(CompressedRoundsTest, ACodeThatNoWorkerWritesEndsItsSender) {
  land(0);
  std::vector<std::byte> bytes = payload(1, "int8");
  const float scale = -1;
  std::memcpy(bytes.data() + compress::kLabelBytes, &scale, sizeof scale);
  land_bytes(1, header(1, kCompressed), bytes);
  land(2);
  engine.fail_lost();
  for (const std::uint32_t i : {0U, 2U}) {
    ASSERT_EQ(failures(i).size(), 1U);
    EXPECT_EQ(failures(i)[0].code, ErrorCode::kPeerLost);
    EXPECT_NE(failures(i)[0].what.find("no worker can have made"), std::string::npos);
    EXPECT_TRUE(data(i).writes.empty());
  }
}

TEST_F(CompressedRoundsTest, APostedPayloadHasTheLengthOfItsCode) {
  data(0).put_on_same_host();
  std::vector<std::byte> bytes = payload(1, "int8:everywhere=1");
  for (const std::size_t length : {bytes.size() - 1, std::size_t{10}}) {
    const transport::RemoteSpan span{0, reinterpret_cast<std::uint64_t>(bytes.data()), length};
    sessions[0]->on_posting(data(0), tensor::bytes_of(header(0, kCompressed)), span);
    ASSERT_EQ(failures(0).size(), 1U);
    control(0).messages.clear();
  }
  const transport::RemoteSpan span{0, reinterpret_cast<std::uint64_t>(bytes.data()), bytes.size()};
  sessions[0]->on_posting(data(0), tensor::bytes_of(header(0, kCompressed)), span);
  land(1, "int8:everywhere=1");
  land(2, "int8:everywhere=1");
  // The answer of the first one is a code, too, in the memory that it named.
  std::vector<float> values(kFloats);
  const auto codec = compress::parse_compression("int8")->codec;
  const auto code = std::as_bytes(std::span(memory[0])).first(codec->encoded_size(kFloats));
  EXPECT_EQ(codec->decode(code, values, compress::Into::kReplace), compress::Decoded::kOk);
  EXPECT_EQ(values, decoded(data(1).writes.at(0)));
}

}  // namespace
}  // namespace bps::server
