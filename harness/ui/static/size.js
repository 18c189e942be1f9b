// Size: controls to a question, the answer shown. A newer question aborts an older one, and an answer that comes late is dropped.

import { ask, complain, options, say, show } from "./net.js";
import { CONTEXTS, LENGTHS, START, nearest, read, write } from "./state.js";

const $ = (id) => document.getElementById(id);
const CURVES_AFTER_MS = 120;
const MOST = 4;
const SPLITS = [1, 2, 4, 8, 16];
// made once: a format of its own for every number costs milliseconds
const WHOLE = new Intl.NumberFormat("en");

let deployments = [{ ...START }];
let active = 0;
let asked = 0;
let pending = null;
let later = 0;

const form = $("controls");
const cards = $("cards");

/** Build the controls from what the server offers. */
export function offer(catalog, calibrated) {
  options($("preset"), [["", "Choose one"], ...catalog.presets.map((preset) => [preset.name, preset.name])]);
  options($("model"), [["", "from the config.json"], ...catalog.models.map((model) => [model.name, model.name])]);
  options($("gpu"), catalog.gpus.map((gpu) => [gpu.name, gpu.title]));
  options($("weights"), catalog.weights.map((name) => [name, name === "auto" ? "the checkpoint's" : name]));
  options($("kv"), catalog.kv.map((name) => [name, name === "auto" ? "auto" : name]));
  for (const id of ["tp", "pp", "dp"]) options($(id), SPLITS.map((n) => [n, n]));
  corrected(calibrated);
  $("preset").addEventListener("change", () => {
    const preset = catalog.presets.find((one) => one.name === $("preset").value);
    if (!preset) return;
    const { model, gpu, tp, weights } = preset;
    const kept = { ...deployments[active], model, gpu, tp, weights, pp: 1, dp: 1 };
    delete kept.config;
    deployments[active] = kept;
    put();
    changed();
  });
}

/** The runs that may correct a sizing. */
export function corrected(names) {
  const known = deployments.map((one) => one.calibration_run).filter(Boolean);
  const all = [...new Set([...names, ...known])];
  options($("calibration_run"), [["", "nothing: priors alone"], ...all.map((name) => [name, name])], deployments[active].calibration_run ?? "");
}

/** Take the state of an address. */
export function restore(query) {
  deployments = read(query);
  active = Math.min(active, deployments.length - 1);
  put();
  size();
}

/** The deployment that is edited, into the controls. */
function put() {
  const one = deployments[active];
  $("model").value = one.config ? "" : one.model;
  $("model").options[0].disabled = !one.config;
  for (const id of ["gpu", "weights", "kv", "tp", "pp", "dp"]) {
    if (![...$(id).options].some((option) => option.value === String(one[id]))) $(id).add(new Option(one[id], one[id]));
    $(id).value = one[id];
  }
  $("gpu_memory_utilization").value = one.gpu_memory_utilization;
  $("max_num_seqs").value = one.max_num_seqs ?? "";
  $("slo_ttft_ms").value = one.slo_ttft_ms ?? "";
  $("slo_tpot_ms").value = one.slo_tpot_ms ?? "";
  $("max_model_len").value = one.max_model_len ? nearest(CONTEXTS, one.max_model_len) : 0;
  $("prompt_tokens").value = nearest(LENGTHS, one.prompt_tokens);
  $("output_tokens").value = nearest(LENGTHS, one.output_tokens);
  $("calibration_run").value = one.calibration_run ?? "";
  $("transfer").checked = Boolean(one.transfer);
  named("config-name", one.config && one.config_name);
  named("calibration-name", one.calibration && "a file that was given");
  label();
  tabs();
}

function named(id, text) {
  $(id).hidden = !text;
  $(id).textContent = text || "";
}

/** The sliders' values, with their units. */
function label() {
  const one = deployments[active];
  const tokens = (n) => `${WHOLE.format(n)} tokens`;
  const shown = {
    gpu_memory_utilization: one.gpu_memory_utilization.toFixed(2),
    max_model_len: one.max_model_len ? tokens(one.max_model_len) : "the model's own",
    prompt_tokens: tokens(one.prompt_tokens),
    output_tokens: tokens(one.output_tokens),
  };
  for (const [id, text] of Object.entries(shown)) {
    form.querySelector(`output[for="${id}"]`).textContent = text;
    $(id).setAttribute("aria-valuetext", text);
  }
}

function tabs() {
  const buttons = deployments.map((one, i) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = `${i + 1}: ${one.config ? one.config_name : one.model}`;
    button.setAttribute("aria-pressed", String(i === active));
    button.addEventListener("click", () => { active = i; put(); launch(); });
    return button;
  });
  const focused = $("deployments").contains(document.activeElement);
  $("deployments").replaceChildren(...buttons);
  if (focused) buttons[active].focus();
  $("add").disabled = deployments.length >= MOST;
  $("remove").disabled = deployments.length < 2;
}

/** A control was moved: what it means for the deployment that is edited. */
function take(control) {
  const one = { ...deployments[active] };
  const { id, value } = control;
  if (id === "max_model_len") {
    if (CONTEXTS[value]) one.max_model_len = CONTEXTS[value];
    else delete one.max_model_len;
  } else if (id === "prompt_tokens" || id === "output_tokens") one[id] = LENGTHS[value];
  else if (["max_num_seqs", "slo_ttft_ms", "slo_tpot_ms"].includes(id)) {
    if (value === "") delete one[id];
    else one[id] = Number(value);
  } else if (id === "transfer") {
    if (control.checked) one.transfer = true;
    else delete one.transfer;
  } else if (id === "calibration_run") {
    delete one.calibration;
    if (value) one[id] = value;
    else delete one[id];
  } else if (id === "model") {
    delete one.config;
    one.model = value;
  } else one[id] = control.type === "range" || ["tp", "pp", "dp"].includes(id) ? Number(value) : value;
  deployments[active] = one;
}

/** Ask, and keep the address up with the state. */
function changed() {
  size();
  history.replaceState(null, "", `#size?${write(deployments)}`);
}

async function size() {
  const number = ++asked;
  pending?.abort();
  pending = new AbortController();
  const { signal } = pending;
  clearTimeout(later);
  cards.setAttribute("aria-busy", "true");
  try {
    const answers = await Promise.all(deployments.map((one) => ask("/api/size", { body: one, signal })));
    if (number !== asked) return;
    // each card was made as if it stood alone
    show(cards, answers.map((answer, i) => beside(answer.html, i + 1)).join(""));
    complain($("size-error"), null);
    say(answers.map((answer) => answer.spoken).join(" "));
    later = setTimeout(() => draw(number, signal), CURVES_AFTER_MS);
  } catch (error) {
    if (number !== asked || signal.aborted) return;
    complain($("size-error"), error);
    cards.replaceChildren();
    $("curves").replaceChildren();
    $("launch").replaceChildren();
    $("launch-notes").textContent = "";
  } finally {
    if (number === asked) {
      cards.setAttribute("aria-busy", "false");
      cards.dataset.answered = String(number);
    }
  }
}

/** A card's place among those side by side: its colour, and identifiers that stay unique. */
function beside(html, place) {
  return place === 1 ? html : html.replace('class="card look1"', `class="card look${place}"`).replaceAll("bar-1", `bar-${place}`);
}

async function draw(number, signal) {
  try {
    const curves = await ask("/api/curves", { body: deployments, signal });
    if (number === asked) show($("curves"), curves.html);
    await launch(number, signal);
  } catch (error) {
    if (number === asked && !signal.aborted) complain($("size-error"), error);
  }
}

/** Launch script and compose file of the deployment that is edited. */
async function launch(number = asked, signal = undefined) {
  let answer;
  try {
    answer = await ask("/api/launch", { body: deployments[active], signal });
  } catch (error) {
    if (signal?.aborted) return;
    answer = { files: {}, notes: [error.message] };
  }
  if (number !== asked) return;
  $("launch-notes").textContent = answer.notes.join(" ");
  $("launch").replaceChildren(...Object.entries(answer.files).map(([name, text]) => file(name, text)));
}

function file(name, text) {
  const part = document.createElement("article");
  const head = document.createElement("h3");
  head.textContent = name;
  const tools = document.createElement("p");
  tools.className = "tools";
  const copy = document.createElement("button");
  copy.type = "button";
  copy.textContent = `Copy ${name}`;
  copy.addEventListener("click", () => copied(text, name));
  const save = document.createElement("button");
  save.type = "button";
  save.textContent = `Download ${name}`;
  save.addEventListener("click", () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "text/plain" }));
    link.download = name;
    link.click();
    URL.revokeObjectURL(link.href);
  });
  tools.append(copy, save);
  const shown = document.createElement("pre");
  shown.tabIndex = 0;
  shown.setAttribute("aria-label", name);
  shown.textContent = text;
  part.append(head, tools, shown);
  return part;
}

async function copied(text, what) {
  try {
    await navigator.clipboard.writeText(text);
    say(`${what} copied`);
  } catch {
    say(`${what} could not be copied: the browser does not allow it here`);
  }
}

/** A dropped or chosen JSON file, as the model or the calibration. */
async function load(source, key) {
  if (!source) return;
  try {
    const content = JSON.parse(await source.text());
    const one = { ...deployments[active], [key]: content };
    if (key === "config") { delete one.model; one.config_name = source.name.slice(0, 200); }
    else delete one.calibration_run;
    deployments[active] = one;
    put();
    changed();
  } catch (error) {
    complain($("size-error"), new Error(`${source.name} is no JSON: ${error.message}`));
  }
}

form.addEventListener("input", (event) => {
  if (event.target.type === "file" || event.target.id === "preset") return;
  take(event.target);
  // the question is on its way while the controls are labelled
  changed();
  label();
  if (event.target.id === "model") put();
});
form.addEventListener("submit", (event) => event.preventDefault());
$("config").addEventListener("change", () => load($("config").files[0], "config"));
$("calibration").addEventListener("change", () => load($("calibration").files[0], "calibration"));
for (const kind of ["dragenter", "dragover"]) form.addEventListener(kind, (event) => { event.preventDefault(); form.classList.add("over"); });
for (const kind of ["dragleave", "drop"]) form.addEventListener(kind, () => form.classList.remove("over"));
form.addEventListener("drop", (event) => { event.preventDefault(); load(event.dataTransfer.files[0], "config"); });
$("add").addEventListener("click", () => { deployments.push({ ...deployments[active] }); active = deployments.length - 1; put(); changed(); });
$("remove").addEventListener("click", () => { deployments.splice(active, 1); active = Math.max(0, active - 1); put(); changed(); });
$("share").addEventListener("click", () => { history.replaceState(null, "", `#size?${write(deployments)}`); copied(location.href, "the link"); });
