// The page: which view, and its state in the address.

import { ask, complain } from "./net.js";
import * as live from "./live.js";
import * as runs from "./runs.js";
import * as size from "./size.js";

const VIEWS = ["size", "runs", "live"];
const $ = (id) => document.getElementById(id);

function place() {
  const [view, query = ""] = location.hash.slice(1).split("?");
  return { view: VIEWS.includes(view) ? view : "size", query };
}

async function go() {
  const { view, query } = place();
  for (const name of VIEWS) {
    $(name).hidden = name !== view;
    const link = document.querySelector(`nav a[data-view="${name}"]`);
    if (name === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = { size: "Size", runs: "Runs", live: "Live" }[view] + " - vllm-harness";
  try {
    if (view === "size") size.restore(query);
    else {
      const found = await runs.list();
      size.corrected(found.calibrated);
      if (view === "live") live.known(found.runs, found.ours);
      else {
        const name = new URLSearchParams(query).get("run");
        if (name) await runs.open(name);
        else runs.none();
      }
    }
  } catch (error) {
    complain($(view === "live" ? "live-error" : view === "runs" ? "runs-error" : "size-error"), error);
  }
}

const catalog = await ask("/api/catalog");
const { calibrated } = await runs.list();
size.offer(catalog, calibrated);
live.offer(catalog);
window.addEventListener("hashchange", go);
// the address holds the state, so this link moves the focus and leaves the address alone
document.querySelector("a.skip").addEventListener("click", (event) => { event.preventDefault(); $("main").focus(); });
await go();
document.documentElement.dataset.ready = "yes";
