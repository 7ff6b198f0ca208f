// Steps `@file@` with onnxruntime-web, in a page or in node. Written by `kd-export client`.
//
//   npm install onnxruntime-web
//   node @client@.mjs @file@
//
// In a page, with a bundler or an import map for "onnxruntime-web":
//   import { Policy } from "./@client@.mjs";
//   const policy = await Policy.load("@file@");
//   const result = await policy.step({ ... });
import * as ort from "onnxruntime-web";

@inputs_told@
const INPUTS = new Map(@inputs@);
@outputs_told@
const OUTPUTS = new Map(@outputs@);
const STATE = new Map(@state@);
const START = new Map(@start@);
const RANGES = new Map(@ranges@);
const NAMES = new Map(@names@);
const LOSES_NAN = @loses_nan@; // whether the file takes NaN for a number
const ARRAYS = {
  float32: Float32Array, float64: Float64Array, int8: Int8Array, int16: Int16Array,
  int32: Int32Array, int64: BigInt64Array, uint8: Uint8Array, bool: Uint8Array,
};

// The policy: `step` carries the state, `reset` begins an episode.
export class Policy {
  static async load(source) {
    ort.env.wasm.numThreads = 1;
    const session = await ort.InferenceSession.create(source, { executionProviders: ["wasm"] });
    for (const [found, wanted] of [[session.inputNames, INPUTS], [session.outputNames, OUTPUTS]])
      if (found.join() !== [...wanted.keys()].join())
        throw new Error(`expected ${[...wanted.keys()]}, got ${found}`);
    return new Policy(session);
  }

  constructor(session) {
    this.session = session;
    this.reset();
  }

  reset() {
    this.state = {};
    for (const name of STATE.keys()) this.state[name] = tensor(name, START.get(name));
  }

  // Takes an array of numbers for each input that is not a state, by name; gives the same.
  async step(values) {
    const feeds = { ...this.state };
    for (const name of INPUTS.keys()) {
      if (STATE.has(name)) continue;
      if (!Object.hasOwn(values, name)) throw new Error(`input ${name} not found`);
      feeds[name] = tensor(name, values[name]);
    }
    const results = await this.session.run(feeds);
    const given = {};
    for (const [name, [dtype, shape]] of OUTPUTS) {
      const found = results[name];
      if (found.type !== dtype || found.dims.join() !== shape.join())
        throw new Error(`${name}: expected ${dtype} ${shape}, got ${found.type} ${found.dims}`);
      given[name] = found.data;
    }
    for (const [name, after] of STATE) {
      this.state[name] = results[after];
      delete given[after];
    }
    return given;
  }
}

function tensor(name, values) {
  const [dtype, shape] = INPUTS.get(name);
  const count = shape.reduce((a, b) => a * b, 1);
  const numbers = values === undefined ? new Array(count).fill(0) : Array.from(values);
  if (numbers.length !== count)
    throw new Error(`${name}: expected ${count} numbers, got ${numbers.length}`);
  const whole = dtype === "int64" ? BigInt : Number;
  const array = ARRAYS[dtype].from(numbers.map((x) => whole(x)));
  if (LOSES_NAN && array.some((x) => x !== x))
    throw new Error(`${name} holds NaN, which the file takes for a number: put a number there`);
  return new ort.Tensor(dtype, array, shape);
}

// Numbers that are the same in every language, to compare.
export function drawn(step, place, name) {
  const [dtype, shape] = INPUTS.get(name);
  const [low, high] = RANGES.get(name);
  const count = shape.reduce((a, b) => a * b, 1);
  return Array.from({ length: count }, (_, i) => {
    const part = ((step * 7919 + place * 104729 + i * 1299709 + 12345) % 10007) / 10007;
    if (dtype === "bool") return part < 0.5 ? 1 : 0;
    return dtype.startsWith("float")
      ? low + (high - low) * part
      : low + Math.floor((high - low + 1) * part);
  });
}

// The steps of every client, as lines: step, name, place, number.
export async function compared(policy, steps = @steps@, reset = @reset@) {
  const lines = [];
  for (let step = 0; step < steps; ++step) {
    if (step === reset) policy.reset(); // where an episode begins
    const values = {};
    [...INPUTS.keys()].forEach((name, place) => {
      if (!STATE.has(name)) values[name] = drawn(step, place, name);
    });
    const results = await policy.step(values);
    for (const [name, wire] of NAMES)
      results[name].forEach((x, i) => lines.push(`${step} ${wire} ${i} ${Number(x).toPrecision(9)}`));
  }
  return lines;
}

if (typeof process !== "undefined" && process.argv?.[1]?.endsWith("@client@.mjs")) {
  const { readFile } = await import("node:fs/promises");
  const policy = await Policy.load(await readFile(process.argv[2] ?? "@file@"));
  console.log((await compared(policy)).join("\n"));
}
