/* Steps `@file@` with ONNX Runtime. Written by `kd-export client`; change it as you like.
 *
 *   ORT=$(python -c "import onnxruntime as o, os; print(os.path.dirname(o.__file__))")/capi
 *   ln -sf "$ORT"/libonnxruntime.so.* libonnxruntime.so.1
 *   gcc -std=c99 -O2 -Wall -Wextra @client@.c -o @client@ ./libonnxruntime.so.1 -Wl,-rpath,'$ORIGIN'
 *   ./@client@ @file@
 *
 * A release of ONNX Runtime for your board serves as well as the one of the Python package. */
@core@
int main(int count, char **words) {
  static @lower@_policy policy;
  static @lower@_inputs in;
  static @lower@_outputs out;
  int wrong = @lower@_load(&policy, count > 1 ? words[1] : "@file@", 1);
  for (int step = 0; step < @steps@ && !wrong; ++step) {
    if (step == @reset@) @lower@_reset(&policy); /* where an episode begins */
    @lower@_fill(&in, step); /* put your observation here */
    wrong = @lower@_step(&policy, &in, &out);
    if (!wrong) @lower@_print(&out, step);
  }
  if (wrong) fprintf(stderr, "%s\n", policy.message);
  @lower@_free(&policy);
  return wrong;
}
