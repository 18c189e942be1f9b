// Live: check, confirm, start; watch by server-sent events; stop.

import { ask, complain, options, say, show } from "./net.js";
import { list } from "./runs.js";

const $ = (id) => document.getElementById(id);
const LEVELS = "";
let source = null;
let watched = null;
let ticket = null;
let profiles = [];

export function offer(catalog) {
  profiles = catalog.profiles;
  options($("profile"), [...profiles.map((profile) => [profile.name, profile.name]), [LEVELS, "levels of users"]], "smoke");
  about();
}

/** The runs that can be watched. */
export function known(runs, ours) {
  const names = runs.map((run) => [run.name, run.state === "running" ? `${run.name} (running)` : run.name]);
  options($("watch"), names, watched ?? undefined);
  if (!watched) {
    const going = ours[0] ?? runs.find((run) => run.state === "running")?.name;
    if (going) watch(going, ours.includes(going));
  }
}

function about() {
  const chosen = profiles.find((profile) => profile.name === $("profile").value);
  $("profile-about").textContent = chosen?.about ?? "";
  $("levels").hidden = $("profile").value !== LEVELS;
}

function wanted() {
  const body = { base_url: $("base_url").value.trim() };
  if ($("ramp-model").value.trim()) body.model = $("ramp-model").value.trim();
  if ($("api_key").value) body.api_key = $("api_key").value;
  if ($("profile").value !== LEVELS) return { ...body, profile: $("profile").value };
  const users = $("users").value.split(/[\s,]+/).filter(Boolean).map(Number);
  const [duration_s, prompt_tokens, output_tokens] = ["duration_s", "ramp-prompt", "ramp-output"].map((id) => Number($(id).value));
  return { ...body, users, duration_s, prompt_tokens, output_tokens };
}

/** What the confirmation says: the host, and the greatest number of users. */
function named(found) {
  const users = found.most_users === null ? "an unlimited number of users" : `up to ${found.most_users.toLocaleString("en")} users at once`;
  const rate = found.most_rate === null ? "" : `, up to ${found.most_rate.toLocaleString("en")} requests a second`;
  const time = found.about_s === null ? "" : `, for about ${Math.ceil(found.about_s / 60)} min`;
  return `${users}${rate} against ${found.host}, model ${found.model}, in ${found.stages} stages${time}.`;
}

$("ramp").addEventListener("submit", async (event) => {
  event.preventDefault();
  complain($("live-error"), null);
  $("check").disabled = true;
  try {
    ticket = await ask("/api/ramps/check", { body: wanted(), again: false });
    $("confirm-text").textContent = `This sends ${named(ticket)}`;
    $("go").textContent = ticket.most_users === null ? `Start against ${ticket.host}` : `Start up to ${ticket.most_users} users against ${ticket.host}`;
    $("confirm").showModal();
  } catch (error) {
    complain($("live-error"), error);
  } finally {
    $("check").disabled = false;
  }
});

$("no").addEventListener("click", () => $("confirm").close());
$("confirm").addEventListener("close", () => $("check").focus());
$("go").addEventListener("click", async () => {
  const chosen = ticket;
  ticket = null;
  $("confirm").close();
  if (!chosen) return;
  $("live-state").textContent = `Starting against ${chosen.host} ...`;
  try {
    const { run } = await ask("/api/ramps/start", { body: { ticket: chosen.id }, again: false });
    $("api_key").value = "";
    watch(run, true);
    const { runs } = await list();
    options($("watch"), runs.map((one) => [one.name, one.name]), run);
  } catch (error) {
    $("live-state").textContent = "Nothing was started.";
    complain($("live-error"), error);
  }
});

/** Follow a run; the browser connects again by itself when the server was away. */
function watch(name, ours) {
  source?.close();
  watched = name;
  const path = name.split("/").map(encodeURIComponent).join("/");
  source = new EventSource(`/api/runs/${path}/events`);
  $("stop").hidden = !ours;
  $("stop").disabled = false;
  $("live-state").textContent = `Watching ${name} ...`;
  source.onmessage = (event) => {
    const seen = JSON.parse(event.data);
    show($("live-view"), seen.html);
    $("live-state").textContent = seen.going ? `${name} goes on.` : `${name} has ended. `;
    if (seen.going) return;
    source.close();
    $("stop").hidden = true;
    const link = document.createElement("a");
    link.href = `#runs?run=${encodeURIComponent(name)}`;
    link.textContent = "Its report";
    $("live-state").append(link);
    say(`${name} has ended`);
  };
  source.onerror = () => {
    if (source.readyState === EventSource.CLOSED) {
      $("live-state").textContent = `${name} cannot be watched.`;
      $("stop").hidden = true;
    } else $("live-state").textContent = `The server does not answer; ${name} is watched again when it does.`;
  };
}

$("stop").addEventListener("click", async () => {
  try {
    await ask(`/api/runs/${watched.split("/").map(encodeURIComponent).join("/")}/stop`, { body: {}, again: false });
    $("live-state").textContent = `${watched}: no new requests; the streams in flight may end. Stop again cuts them.`;
  } catch (error) {
    complain($("live-error"), error);
  }
});
$("watch-it").addEventListener("click", async () => {
  if (!$("watch").value) return;
  const { ours } = await list();
  watch($("watch").value, ours.includes($("watch").value));
});
$("profile").addEventListener("input", about);
