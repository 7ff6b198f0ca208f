const $ = (id) => document.getElementById(id);
const DATA = JSON.parse($("data").textContent);

async function unpacked(id) {
  const text = atob($(id).textContent);
  const bytes = Uint8Array.from(text, (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function number(x) {
  if (Number.isInteger(x)) return String(x);
  const size = Math.abs(x);
  return size !== 0 && (size < 0.001 || size >= 10000) ? x.toExponential(2) : x.toFixed(3);
}

function make(tag, parent, words = {}) {
  const node = document.createElement(tag);
  Object.assign(node, words);
  parent.append(node);
  return node;
}

function shown(node, value, unit) {
  node.textContent = number(value);
  if (unit) make("small", node, { textContent: ` ${unit}` });
}

const isFloat = (entry) => entry.dtype.startsWith("float");
const values = {}; // the numbers of each input, by its name in the file
const sliders = [];
const bars = {};

function controls() {
  for (const entry of DATA.inputs) {
    const group = make("div", $("inputs"), { className: "group" });
    make("code", group, { textContent: entry.wire });
    values[entry.name] = new Array(entry.count).fill(0);
    entry.elements.forEach((element, place) => {
      const row = make("div", group, { className: "row" });
      const id = `in-${entry.wire}-${place}`;
      make("label", row, { textContent: element.name, htmlFor: id, title: element.name });
      const low = Number(element.low), high = Math.max(Number(element.high), low + (isFloat(entry) ? 1e-6 : 0));
      const slider = make("input", row, { type: "range", id });
      slider.min = low;
      slider.max = high;
      slider.step = isFloat(entry) ? (high - low) / 200 : 1;
      const output = make("output", row);
      const set = (value) => {
        const x = isFloat(entry) ? value : Math.round(value);
        if (entry.elements.length < entry.count) values[entry.name].fill(x);
        else values[entry.name][place] = x;
        slider.value = x;
        shown(output, x, element.unit);
      };
      set(low <= 0 && high >= 0 ? 0 : (low + high) / 2);
      slider.addEventListener("input", () => { set(Number(slider.value)); step(); });
      sliders.push(() => set(low + Math.random() * (high - low)));
    });
  }
  for (const entry of DATA.outputs) {
    const group = make("div", $("outputs"), { className: "group" });
    make("code", group, { textContent: entry.wire });
    bars[entry.name] = entry.elements.map((element) => {
      const row = make("div", group, { className: "row" });
      make("span", row, { className: "name", textContent: element.name, title: element.name });
      const bar = make("i", make("div", row, { className: "bar" }));
      return { bar, output: make("output", row, { textContent: "\u2013" }), element, low: Number(element.low), high: Number(element.high) };
    });
  }
}

function draw(results) {
  for (const [name, rows] of Object.entries(bars)) {
    rows.forEach((row, place) => {
      const x = Number(results[name][place]);
      row.low = Math.min(row.low, x);
      row.high = Math.max(row.high, x);
      const at = (value) => (100 * (value - row.low)) / (row.high - row.low || 1);
      const zero = at(Math.min(Math.max(0, row.low), row.high));
      row.bar.style.left = `${Math.min(zero, at(x))}%`;
      row.bar.style.width = `${Math.max(Math.abs(at(x) - zero), 1)}%`;
      shown(row.output, x, row.element.unit);
    });
  }
}

let policy, busy = false, again = false, steps = 0, timer = null;

async function step() {
  if (!policy) return;
  if (busy) { again = true; return; }
  busy = true;
  do {
    again = false;
    draw(await policy.step(values));
    steps += 1;
    $("count").textContent = `${steps} step${steps === 1 ? "" : "s"}${STATE.size ? " since the reset" : ""}`;
  } while (again);
  busy = false;
}

// Compare a rollout with the numbers that the runner in Python gave when this page was written.
async function selfTest() {
  let largest = 0, size = 0, count = 0;
  policy.reset();
  const start = performance.now();
  for (let at = 0; at < DATA.expected.length; ++at) {
    if (at === @reset@) policy.reset();
    const given = {};
    for (const entry of DATA.inputs) given[entry.name] = drawn(at, entry.place, entry.name);
    const results = await policy.step(given);
    const found = DATA.outputs.flatMap((entry) => Array.from(results[entry.name], Number).slice(0, DATA.kept));
    DATA.expected[at].forEach((wanted, i) => {
      const apart = Math.abs(found[i] - wanted);
      largest = Math.max(largest, Number.isNaN(apart) ? Infinity : apart);
      size = Math.max(size, Math.abs(wanted));
      count += 1;
    });
  }
  const each = (performance.now() - start) / DATA.expected.length;
  policy.reset();
  const ok = largest <= 1e-4 * Math.max(size, 1);
  $("test").className = ok ? "good" : "bad";
  $("test").textContent = `${ok ? "\u2713 passed" : "\u2717 FAILED"}: ${DATA.expected.length} steps with a reset, ${count} numbers compared with Python, largest difference ${largest === 0 ? 0 : largest.toExponential(1)}.`;
  $("here").textContent = `in this browser ${each.toFixed(2)} ms`;
  return ok;
}

async function begin(bytes) {
  policy = await Policy.load(bytes);
  const ok = await selfTest();
  for (const id of ["step", "run", "random", "reset"]) $(id).disabled = false;
  $("state").textContent = ok ? "The model runs in this page, without a network." : "The model gives other numbers here than in Python.";
  $("state").className = ok ? "state good" : "state bad";
  await step();
}

async function main() {
  controls();
  const code = new Blob([await unpacked("bundle")], { type: "text/javascript" });
  ort = await import(URL.createObjectURL(code));
  ort.env.wasm.wasmBinary = (await unpacked("engine")).buffer;
  ort.env.logLevel = "error";
  if ($("model").textContent) return begin(await unpacked("model"));
  $("choose").hidden = false;
  $("state").textContent = "Choose the file to run it here.";
  $("choose").querySelector("input").addEventListener("change", async (event) => {
    await begin(new Uint8Array(await event.target.files[0].arrayBuffer())).catch(failed);
  });
}

function failed(error) {
  $("state").className = "state bad";
  $("state").textContent = `The model does not run here: ${error.message ?? error}`;
}

$("step").addEventListener("click", step);
$("random").addEventListener("click", () => { sliders.forEach((set) => set()); step(); });
$("reset").addEventListener("click", () => { policy.reset(); steps = 0; step(); });
$("run").addEventListener("click", () => {
  $("run").textContent = timer === null ? "Stop" : "Run";
  if (timer !== null) { clearInterval(timer); timer = null; return; }
  timer = setInterval(() => { sliders.forEach((set) => set()); step(); }, Math.max(1000 / DATA.rate, 100));
});
main().catch(failed);
