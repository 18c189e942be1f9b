// Runs: the list, one run's report, two compared.

import { ask, complain, options, say, show } from "./net.js";

const $ = (id) => document.getElementById(id);
let asked = 0;

/** The list anew; what of it the other views offer. */
export async function list() {
  const answer = await ask("/api/runs");
  show($("runs-list"), answer.html);
  ticked();
  const calibrated = answer.runs.filter((run) => run.calibrated).map((run) => run.name);
  options($("correct"), [["", "its own calibration"], ...calibrated.map((name) => [name, name])], $("correct").value);
  return { ...answer, calibrated };
}

/** One run's report below the list. */
export async function open(name) {
  const number = ++asked;
  try {
    const by = $("correct").value ? `?calibration=${encodeURIComponent($("correct").value)}` : "";
    const path = name.split("/").map(encodeURIComponent).join("/");
    const answer = await ask(`/api/runs/${path}${by}`);
    if (number !== asked) return;
    show($("run"), answer.html);
    const link = document.createElement("a");
    link.href = `/api/runs/${path}/report.html`;
    link.textContent = "This report as a page of its own, to keep or print";
    const line = document.createElement("p");
    line.append(link);
    $("run").prepend(line);
    complain($("runs-error"), null);
    say($("run").querySelector("h1")?.textContent ?? "");
  } catch (error) {
    if (number !== asked) return;
    $("run").replaceChildren();
    complain($("runs-error"), error);
  }
}

export function none() {
  asked += 1;
  $("run").replaceChildren();
  complain($("runs-error"), null);
}

function ticked() {
  const names = [...$("runs-list").querySelectorAll("input:checked")].map((tick) => tick.value);
  $("compare").disabled = names.length !== 2;
  return names;
}

$("runs-list").addEventListener("change", ticked);
$("refresh").addEventListener("click", () => list().catch((error) => complain($("runs-error"), error)));
$("correct").addEventListener("change", () => {
  const name = new URLSearchParams(location.hash.split("?")[1] ?? "").get("run");
  if (name) open(name);
});
$("compare").addEventListener("click", async () => {
  const [b, a] = ticked();
  const number = ++asked;
  try {
    const answer = await ask("/api/compare", { body: { a, b } });
    if (number === asked) show($("run"), answer.html);
    complain($("runs-error"), null);
  } catch (error) {
    complain($("runs-error"), error);
  }
});
