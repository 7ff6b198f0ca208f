// Steps `@file@` with ONNX Runtime. Written by `kd-export client`; change it as you like.
//
//   ORT=$(python -c "import onnxruntime as o, os; print(os.path.dirname(o.__file__))")/capi
//   ln -sf "$ORT"/libonnxruntime.so.* libonnxruntime.so.1
//   g++ -std=c++17 -O2 -Wall -Wextra @client@.cpp -o @client@ ./libonnxruntime.so.1 -Wl,-rpath,'$ORIGIN'
//   ./@client@ @file@
//
// A release of ONNX Runtime for your board serves as well as the one of the Python package.
#include <cstddef>
#include <stdexcept>
#include <string>

@core@
// The policy: `step` carries the state, `reset` begins an episode.
class Policy {
 public:
  explicit Policy(const std::string &path, int threads = 1) {
    if (@lower@_load(&policy_, path.c_str(), threads)) throw std::runtime_error(policy_.message);
  }
  ~Policy() { @lower@_free(&policy_); }
  Policy(const Policy &) = delete;
  Policy &operator=(const Policy &) = delete;

  void reset() { @lower@_reset(&policy_); }
  @lower@_outputs step(const @lower@_inputs &in) {
    @lower@_outputs out;
    if (@lower@_step(&policy_, &in, &out)) throw std::runtime_error(policy_.message);
    return out;
  }

 private:
  @lower@_policy policy_;
};

int main(int count, char **words) try {
  Policy policy(count > 1 ? words[1] : "@file@");
  @lower@_inputs in{};
  for (int step = 0; step < @steps@; ++step) {
    if (step == @reset@) policy.reset();  // where an episode begins
    @lower@_fill(&in, step);  // put your observation here
    const @lower@_outputs out = policy.step(in);
    @lower@_print(&out, step);
  }
} catch (const std::exception &error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
