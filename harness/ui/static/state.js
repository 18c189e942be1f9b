// A sizing as the address holds it. A deployment is one query string; several stand side by side as d=...&d=...

export const CONTEXTS = [null, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072];

/** Lengths in tokens that the sliders offer: four a doubling, from 32 to 128k. */
export const LENGTHS = Array.from({ length: 49 }, (_, i) => {
  const exact = 32 * 2 ** (i / 4);
  const step = 2 ** Math.max(0, Math.floor(Math.log2(exact)) - 4);
  return Math.round(exact / step) * step;
});

const NUMBERS = ["tp", "pp", "dp", "max_model_len", "prompt_tokens", "output_tokens", "gpu_memory_utilization", "max_num_seqs",
  "slo_ttft_ms", "slo_tpot_ms"];
const TEXTS = ["model", "config_name", "gpu", "weights", "kv", "calibration_run"];
const FLAGS = ["transfer"];
const CONTENTS = ["config", "calibration"];
/** Beyond this a link would not pass everywhere; a dropped file longer than it stays out of the link. */
const MOST_CONTENT = 6000;

export const START = {
  model: "llama-3.1-8b", gpu: "h100-sxm", weights: "auto", kv: "auto", tp: 1, pp: 1, dp: 1,
  max_model_len: 8192, prompt_tokens: 1024, output_tokens: 256, gpu_memory_utilization: 0.92,
};

export function write(deployments) {
  const all = new URLSearchParams();
  for (const deployment of deployments) {
    const one = new URLSearchParams();
    for (const key of [...TEXTS, ...NUMBERS]) {
      if (deployment[key] !== undefined && deployment[key] !== null) one.set(key, deployment[key]);
    }
    for (const key of FLAGS) if (deployment[key]) one.set(key, "1");
    for (const key of CONTENTS) {
      const text = deployment[key] === undefined ? "" : JSON.stringify(deployment[key]);
      if (text && text.length <= MOST_CONTENT) one.set(key, text);
    }
    all.append("d", one.toString());
  }
  return all.toString();
}

/** The deployments of an address; what it does not hold is left at the start's value, and what it cannot mean is dropped. */
export function read(query) {
  const found = new URLSearchParams(query).getAll("d").slice(0, 4).map((text) => {
    const one = new URLSearchParams(text);
    const deployment = {};
    for (const key of TEXTS) if (one.has(key)) deployment[key] = one.get(key);
    for (const key of NUMBERS) {
      const value = Number(one.get(key));
      if (one.has(key) && Number.isFinite(value)) deployment[key] = value;
    }
    for (const key of FLAGS) if (one.get(key) === "1") deployment[key] = true;
    for (const key of CONTENTS) {
      try {
        if (one.has(key)) deployment[key] = JSON.parse(one.get(key));
      } catch {
        // a link that was cut: the server says what is missing then
      }
    }
    const base = { ...START };
    if (deployment.config) delete base.model;
    if (!("max_model_len" in deployment)) delete base.max_model_len;
    return { ...base, ...deployment };
  });
  return found.length ? found : [{ ...START }];
}

/** Index of the length nearest to a number of tokens. */
export function nearest(list, tokens) {
  let best = 0;
  list.forEach((value, i) => { if (value !== null && Math.abs(value - tokens) < Math.abs((list[best] ?? Infinity) - tokens)) best = i; });
  return best;
}
