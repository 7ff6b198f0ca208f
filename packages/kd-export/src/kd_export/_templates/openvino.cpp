// Steps `@file@` with OpenVINO. Written by `kd-export client`; change it as you like.
//
//   OV=$(python -c "import openvino as o, os; print(os.path.dirname(o.__file__))")
//   g++ -std=c++17 -O2 -Wall -Wextra @client@.cpp -o @client@ -isystem "$OV"/include "$OV"/libs/libopenvino.so.* -Wl,-rpath,"$OV"/libs
//   ./@client@ @file@
#include <openvino/openvino.hpp>

#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

struct Inputs {  // what a step takes
@input_fields@
};
struct Outputs {  // what a step gives
@output_fields@
};

class Policy {
 public:
  explicit Policy(const std::string &path) {
    ov::Core core;
    // Without this, OpenVINO may compute in fewer bits than the file was verified with.
    auto model = core.compile_model(path, "CPU", ov::hint::inference_precision(ov::element::f32),
                                    ov::inference_num_threads(1));
@checks@
    request_ = model.create_infer_request();
    reset();
  }

  void reset() {
@resets@
  }

  Outputs step(const Inputs &in) {
    Outputs out;
@sets@
    request_.infer();
@gets@
    return out;
  }

 private:
  static void check(const ov::Output<const ov::Node> &found, ov::element::Type type,
                    const ov::PartialShape &shape) {
    if (found.get_element_type() != type || !found.get_partial_shape().compatible(shape))
      throw std::runtime_error("another dtype or shape: " + found.get_any_name());
  }
  static constexpr const char *NAN_IS_LOST =
      " holds NaN, which OpenVINO takes for a number: put a number there";
  // Told by its bits: `-ffast-math` leaves comparisons out.
  template <typename Bits>
  static bool holds_nan(const void *data, size_t bytes, Bits infinity) {
    for (size_t at = 0; at < bytes; at += sizeof(Bits)) {
      Bits number;
      std::memcpy(&number, static_cast<const char *>(data) + at, sizeof number);
      if (static_cast<Bits>(number << 1) > infinity) return true;
    }
    return false;
  }
  void set(const char *name, ov::element::Type type, const ov::Shape &shape, const void *data,
           size_t bytes) {
    if (type == ov::element::f32 && holds_nan<uint32_t>(data, bytes, 0xff000000u))
      throw std::runtime_error(std::string(name) + NAN_IS_LOST);
    if (type == ov::element::f64 && holds_nan<uint64_t>(data, bytes, uint64_t{0xffe} << 52))
      throw std::runtime_error(std::string(name) + NAN_IS_LOST);
    ov::Tensor tensor(type, shape);
    std::memcpy(tensor.data(), data, bytes);
    request_.set_tensor(name, tensor);
  }
  void get(const char *name, void *data, size_t bytes) {
    const ov::Tensor tensor = request_.get_tensor(name);
    if (tensor.get_byte_size() != bytes) throw std::runtime_error(std::string("another size: ") + name);
    std::memcpy(data, tensor.data(), bytes);
  }
  ov::InferRequest request_;
  struct {
@state_fields@
  } state_;
};

// Numbers that are the same in every language, to compare.
static double drawn(int64_t step, int64_t place, int64_t i) {
  return static_cast<double>((step * 7919 + place * 104729 + i * 1299709 + 12345) % 10007) / 10007.0;
}

int main(int count, char **words) try {
  Policy policy(count > 1 ? words[1] : "@file@");
  Inputs inputs{};
  Inputs *in = &inputs;
  for (int step = 0; step < @steps@; ++step) {
    if (step == @reset@) policy.reset();  // where an episode begins
@fill@
    const Outputs outputs = policy.step(inputs);  // put your observation in `inputs`
    const Outputs *out = &outputs;
@print@
  }
} catch (const std::exception &error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
