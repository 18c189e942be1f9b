// Asking the server. It alone computes; what comes back is shown as it is.

/** What the server said instead of an answer. */
export class Refused extends Error {
  constructor(status, error, hint) {
    super(hint ? `${error} (${hint})` : error);
    this.status = status;
  }
}

const banner = document.getElementById("lost");
const RETRY_MS = 1500;

function pause(signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, RETRY_MS);
    signal?.addEventListener("abort", () => { clearTimeout(timer); reject(signal.reason); }, { once: true });
  });
}

/** JSON of the server. While it is away or busy a question that may be asked twice is asked again, until it is answered or aborted. */
export async function ask(path, { body, signal, again = true } = {}) {
  for (;;) {
    let response;
    try {
      response = await fetch(path, body === undefined ? { signal } : {
        method: "POST", signal, headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
      });
    } catch (error) {
      if (signal?.aborted || !(error instanceof TypeError)) throw error;
      banner.hidden = false;
      if (!again) throw new Refused(0, "the server does not answer", "");
      await pause(signal);
      continue;
    }
    banner.hidden = true;
    if (response.status === 503 && again) { await pause(signal); continue; }
    const answer = await response.json();
    if (!response.ok) throw new Refused(response.status, answer.error, answer.hint);
    return answer;
  }
}

/** Put the server's markup into an element. Folded parts that were opened or closed stay so, and so does the focus in them. */
export function show(element, html) {
  const state = [...element.querySelectorAll("details")].map((part) => part.open);
  const held = document.activeElement;
  const place = element.contains(held) ? [...element.querySelectorAll("summary, [tabindex], a, input, button")].indexOf(held) : -1;
  const template = document.createElement("template");
  template.innerHTML = html;
  element.replaceChildren(template.content);
  const parts = [...element.querySelectorAll("details")];
  if (parts.length === state.length) parts.forEach((part, i) => { part.open = state[i]; });
  if (place >= 0) element.querySelectorAll("summary, [tabindex], a, input, button")[place]?.focus();
}

/** Show or clear an error. */
export function complain(element, error) {
  element.hidden = !error;
  element.textContent = error ? error.message : "";
}

/** Tell a screen reader. */
export function say(text) {
  document.getElementById("said").textContent = text;
}

/** Fill a select: [value, text] each. */
export function options(select, pairs, value) {
  select.replaceChildren(...pairs.map(([key, text]) => new Option(text, key)));
  if (value !== undefined) select.value = value;
}
