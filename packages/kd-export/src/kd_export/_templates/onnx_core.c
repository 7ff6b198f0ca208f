#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The part of ONNX Runtime's C interface that is used: functions by their place in its table. The
 * places are those of its first version and never change, so that no header is needed. */
typedef void *handle;
typedef void (*function)(void);
typedef struct {
  const function *(*GetApi)(uint32_t version);
  const char *(*GetVersionString)(void);
} ort_base;
#ifdef __cplusplus
extern "C" {
#endif
const ort_base *OrtGetApiBase(void);
#ifdef __cplusplus
}
#endif
#define ORT(place, result, ...) ((result (*)(__VA_ARGS__))ort[place])
#define ORT_MESSAGE ORT(2, const char *, handle)
#define ORT_ENV ORT(3, handle, int, const char *, handle *)
#define ORT_SESSION ORT(7, handle, handle, const char *, handle, handle *)
#define ORT_RUN \
  ORT(9, handle, handle, handle, const char *const *, const handle *, size_t, const char *const *, \
      size_t, handle *)
#define ORT_OPTIONS ORT(10, handle, handle *)
#define ORT_THREADS ORT(24, handle, handle, int)
#define ORT_INPUTS ORT(30, handle, handle, size_t *)
#define ORT_OUTPUTS ORT(31, handle, handle, size_t *)
#define ORT_INPUT_TYPE ORT(33, handle, handle, size_t, handle *)
#define ORT_OUTPUT_TYPE ORT(34, handle, handle, size_t, handle *)
#define ORT_INPUT_NAME ORT(36, handle, handle, size_t, handle, char **)
#define ORT_OUTPUT_NAME ORT(37, handle, handle, size_t, handle, char **)
#define ORT_TENSOR ORT(49, handle, handle, void *, size_t, const int64_t *, size_t, int, handle *)
#define ORT_DATA ORT(51, handle, handle, void **)
#define ORT_AS_TENSOR ORT(55, handle, handle, handle *)
#define ORT_DTYPE ORT(60, handle, handle, int *)
#define ORT_RANK ORT(61, handle, handle, size_t *)
#define ORT_SHAPE ORT(62, handle, handle, int64_t *, size_t)
#define ORT_COUNT ORT(64, handle, handle, size_t *)
#define ORT_FORM ORT(65, handle, handle, handle *)
#define ORT_MEMORY ORT(69, handle, int, int, handle *)
#define ORT_FREE ORT(76, handle, handle, void *)
#define ORT_ALLOCATOR ORT(78, handle, handle *)
enum { DROP_ENV = 92, DROP_STATUS = 93, DROP_MEMORY = 94, DROP_SESSION = 95, DROP_VALUE = 96 };
enum { DROP_TYPE = 98, DROP_FORM = 99, DROP_OPTIONS = 100 };
#define ORT_DROP(place) ORT(place, void, handle)

/* What the file takes and gives. An output that is the next value of a state goes to `next`. */
typedef struct {
  const char *name;
  int dtype;
  size_t dims;
  int64_t shape[8];
  size_t count, bytes, offset;
  int next;
} @lower@_tensor;

/* What a step takes. */
typedef struct {
@input_fields@
} @lower@_inputs;

/* What a step gives. */
typedef struct {
@output_fields@
} @lower@_outputs;

/* What is carried from step to step. */
typedef struct {
@state_fields@
} @lower@_state;

enum { @upper@_INPUTS = @input_count@, @upper@_OUTPUTS = @output_count@ };
enum { @upper@_LOSES_NAN = @loses_nan@ }; /* whether the file takes NaN for a number */
static const @lower@_tensor @lower@_takes[] = {
@takes@
};
static const @lower@_tensor @lower@_gives[] = {
@gives@
};
static const @lower@_state @lower@_start = {
@start@
};

typedef struct {
  const function *ort;
  handle env, options, session, memory;
  @lower@_state state;
  char message[512];
} @lower@_policy;

/* Keep the message of a status, if it is one; return whether it is. */
static int @lower@_failed(@lower@_policy *p, handle status) {
  const function *ort = p->ort;
  if (!status) return 0;
  snprintf(p->message, sizeof p->message, "%s", ORT_MESSAGE(status));
  ORT_DROP(DROP_STATUS)(status);
  return 1;
}

static int @lower@_refuse(@lower@_policy *p, const char *what, const char *name) {
  snprintf(p->message, sizeof p->message, "%s `%s`: the file is not the one this program is for",
           what, name);
  return 1;
}

/* Compare one input or output of the file with what this program is written for. */
static int @lower@_check(@lower@_policy *p, int output, size_t place) {
  const function *ort = p->ort;
  const @lower@_tensor *want = output ? &@lower@_gives[place] : &@lower@_takes[place];
  handle allocator = NULL, type = NULL, form = NULL;
  char *name = NULL;
  int dtype = 0, wrong;
  size_t rank = 0;
  int64_t shape[8] = {0};
  if (@lower@_failed(p, ORT_ALLOCATOR(&allocator))) return 1;
  if (@lower@_failed(p, output ? ORT_OUTPUT_NAME(p->session, place, allocator, &name)
                         : ORT_INPUT_NAME(p->session, place, allocator, &name)))
    return 1;
  wrong = strcmp(name, want->name) != 0;
  if (@lower@_failed(p, ORT_FREE(allocator, name))) return 1;
  if (wrong) return @lower@_refuse(p, "not found in its place:", want->name);
  if (@lower@_failed(p, output ? ORT_OUTPUT_TYPE(p->session, place, &type)
                         : ORT_INPUT_TYPE(p->session, place, &type)))
    return 1;
  wrong = @lower@_failed(p, ORT_AS_TENSOR(type, &form)) || !form ||
          @lower@_failed(p, ORT_DTYPE(form, &dtype)) || @lower@_failed(p, ORT_RANK(form, &rank)) ||
          rank > 8 || @lower@_failed(p, ORT_SHAPE(form, shape, rank));
  ORT_DROP(DROP_TYPE)(type);
  if (wrong || dtype != want->dtype || rank != want->dims)
    return @lower@_refuse(p, "another dtype or rank:", want->name);
  for (size_t dim = 0; dim < rank; ++dim)
    if (shape[dim] >= 0 && shape[dim] != want->shape[dim])
      return @lower@_refuse(p, "another shape:", want->name);
  return 0;
}

/* Set the state back to what it starts with. */
static void @lower@_reset(@lower@_policy *p) { p->state = @lower@_start; }

/* Load and check the file. Returns 0, or 1 with a message in `p->message`. */
static int @lower@_load(@lower@_policy *p, const char *path, int threads) {
  const function *ort;
  size_t inputs = 0, outputs = 0;
  memset(p, 0, sizeof *p);
  ort = p->ort = OrtGetApiBase()->GetApi(1);
  @lower@_reset(p);
  if (@lower@_failed(p, ORT_ENV(3, "@lower@", &p->env)) ||
      @lower@_failed(p, ORT_OPTIONS(&p->options)) ||
      @lower@_failed(p, ORT_THREADS(p->options, threads)) ||
      @lower@_failed(p, ORT_SESSION(p->env, path, p->options, &p->session)) ||
      @lower@_failed(p, ORT_MEMORY(1, 0, &p->memory)) ||
      @lower@_failed(p, ORT_INPUTS(p->session, &inputs)) ||
      @lower@_failed(p, ORT_OUTPUTS(p->session, &outputs)))
    return 1;
  if (inputs != @upper@_INPUTS || outputs != @upper@_OUTPUTS)
    return @lower@_refuse(p, "another number of inputs or outputs in", path);
  for (size_t place = 0; place < inputs; ++place)
    if (@lower@_check(p, 0, place)) return 1;
  for (size_t place = 0; place < outputs; ++place)
    if (@lower@_check(p, 1, place)) return 1;
  return 0;
}

/* Whether an input holds NaN. It is told by its bits: `-ffast-math` leaves comparisons out. */
static int @lower@_holds_nan(const @lower@_tensor *t, const char *data) {
  for (size_t i = 0; i < t->count; ++i) {
    uint32_t single = 0;
    uint64_t twice = 0;
    if (t->dtype == 1) memcpy(&single, data + 4 * i, 4);
    if (t->dtype == 11) memcpy(&twice, data + 8 * i, 8);
    if (single << 1 > 0xff000000u || twice << 1 > (uint64_t)0xffe << 52) return 1;
  }
  return 0;
}

/* Run one step, and carry the state. Returns 0, or 1 with a message in `p->message`. */
static int @lower@_step(@lower@_policy *p, const @lower@_inputs *in, @lower@_outputs *out) {
  const function *ort = p->ort;
  handle takes[@upper@_INPUTS] = {0}, gives[@upper@_OUTPUTS] = {0};
  const char *input_names[@upper@_INPUTS], *output_names[@upper@_OUTPUTS];
  @lower@_state state = p->state;
  int wrong = 0;
  for (size_t i = 0; i < @upper@_INPUTS && !wrong; ++i) {
    const @lower@_tensor *t = &@lower@_takes[i];
    char *from = t->next ? (char *)&state : (char *)(uintptr_t)in;
    input_names[i] = t->name;
    if (@upper@_LOSES_NAN && @lower@_holds_nan(t, from + t->offset)) {
      snprintf(p->message, sizeof p->message,
               "`%s` holds NaN, which the file takes for a number: put a number there", t->name);
      wrong = 1;
      break;
    }
    wrong = @lower@_failed(p, ORT_TENSOR(p->memory, from + t->offset, t->bytes, t->shape, t->dims,
                                   t->dtype, &takes[i]));
  }
  for (size_t i = 0; i < @upper@_OUTPUTS; ++i) output_names[i] = @lower@_gives[i].name;
  wrong = wrong || @lower@_failed(p, ORT_RUN(p->session, NULL, input_names, takes, @upper@_INPUTS,
                                       output_names, @upper@_OUTPUTS, gives));
  for (size_t i = 0; i < @upper@_OUTPUTS && !wrong; ++i) {
    const @lower@_tensor *t = &@lower@_gives[i];
    void *data = NULL;
    handle form = NULL;
    size_t count = 0;
    wrong = @lower@_failed(p, ORT_DATA(gives[i], &data)) || @lower@_failed(p, ORT_FORM(gives[i], &form)) ||
            @lower@_failed(p, ORT_COUNT(form, &count));
    if (form) ORT_DROP(DROP_FORM)(form);
    if (!wrong && count != t->count) wrong = @lower@_refuse(p, "another size:", t->name);
    if (!wrong) memcpy((t->next ? (char *)&p->state : (char *)out) + t->offset, data, t->bytes);
  }
  for (size_t i = 0; i < @upper@_INPUTS; ++i) if (takes[i]) ORT_DROP(DROP_VALUE)(takes[i]);
  for (size_t i = 0; i < @upper@_OUTPUTS; ++i) if (gives[i]) ORT_DROP(DROP_VALUE)(gives[i]);
  return wrong;
}

static void @lower@_free(@lower@_policy *p) {
  const function *ort = p->ort;
  if (p->memory) ORT_DROP(DROP_MEMORY)(p->memory);
  if (p->session) ORT_DROP(DROP_SESSION)(p->session);
  if (p->options) ORT_DROP(DROP_OPTIONS)(p->options);
  if (p->env) ORT_DROP(DROP_ENV)(p->env);
}

/* Fill the inputs of a step with numbers that are the same in every language, to compare. */
static double @lower@_drawn(int64_t step, int64_t place, int64_t i) {
  return (double)((step * 7919 + place * 104729 + i * 1299709 + 12345) % 10007) / 10007.0;
}

static void @lower@_fill(@lower@_inputs *in, int64_t step) {
@fill@
}

static void @lower@_print(const @lower@_outputs *out, int step) {
@print@
}
