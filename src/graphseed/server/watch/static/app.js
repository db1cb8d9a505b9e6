// What the page asks, how often, and who gets the answer. Shows nothing by itself.

import { Chat } from "./chat.js";
import { Spark, Timeline } from "./charts.js";
import * as views from "./views.js";

const POLL_MS = 1000;
const SLOWEST_MS = 8000;
const RATE_SECONDS = 2;
const KEPT_SECONDS = 900;

const byId = (id) => document.getElementById(id);

const page = {
  key: sessionStorage.getItem("graphseed-key") || "",
  epoch: -1,
  seq: 0,
  rows: new Map(), // identities by number
  observations: [],
  history: [], // one sample of the counters for each poll
  props: null,
  timer: 0,
  waitMs: POLL_MS,
  isAsking: false,
};

const timeline = new Timeline(byId("timeline"), byId("legend"), byId("picked"));
const spark = new Spark(byId("spark"));
const chat = new Chat(ask, () => poll());

/** Ask this server. Throws an Error with the server's own words and its status. */
async function ask(path, options = {}) {
  const headers = { ...(options.headers || {}) };
  if (page.key) headers.Authorization = `Bearer ${page.key}`;
  const reply = await fetch(path, { ...options, headers, cache: "no-store" });
  if (reply.ok) return reply;
  const body = await reply.json().catch(() => ({}));
  const error = new Error(body.error?.message || `the server answered ${reply.status}`);
  error.status = reply.status;
  throw error;
}

async function poll() {
  if (page.isAsking || document.hidden) return;
  page.isAsking = true;
  clearTimeout(page.timer);
  try {
    if (page.props === null) await learn();
    const reply = await ask(`prompt-graphs?after=${page.seq}`);
    take(await reply.json());
    page.waitMs = POLL_MS;
    byId("key-form").hidden = true;
  } catch (error) {
    failed(error);
  } finally {
    page.isAsking = false;
    if (!document.hidden) page.timer = setTimeout(poll, page.waitMs);
  }
}

/** What seldom changes: the model and the settings. */
async function learn() {
  const props = await (await ask("props")).json();
  page.props = props;
  views.showFacts(props);
  chat.learn(props);
}

function take(told) {
  if (told.epoch !== page.epoch) {
    const isFirst = page.epoch === -1;
    page.epoch = told.epoch;
    page.rows.clear();
    page.history.length = 0;
    if (!isFirst) { // another engine: everything is asked for again
      page.seq = 0;
      page.props = null;
      page.observations.length = 0;
      return;
    }
  }
  page.seq = told.seq;
  for (const row of told.identities) page.rows.set(row.id, row);
  page.observations.push(...told.timeline);
  const oldest = told.now - KEPT_SECONDS;
  const first = page.observations.findIndex((one) => one.at >= oldest);
  page.observations.splice(0, first < 0 ? page.observations.length : first);
  remember(told);
  show(told);
}

function remember(told) {
  const { prompt, decode } = told.namespaces;
  page.history.push({
    at: told.now,
    prompt: prompt.tokens,
    decode: decode.tokens,
    candidates: prompt.candidates,
    replayed: prompt.replayed,
  });
  while (page.history[0].at < told.now - 61) page.history.shift();
}

function show(told) {
  const isBusy = told.requests.processing + told.requests.waiting > 0;
  views.showCondition(told.is_sleeping ? "asleep" : isBusy ? "running" : "idle", "good");
  views.showAlarms(told);
  views.showNow(told, page.props, page.history, rate, [...page.rows.values()]);
  views.showBytes(told, release);
  if (told.identities.length || page.rows.size === 0) views.showIdentities([...page.rows.values()]);
  spark.draw(page.history.map((_, index) => rate("prompt", index)));
  draw(told.now);
}

function draw(now) {
  timeline.draw(page.observations, {
    now,
    namespace: byId("namespace").value,
    seconds: Number(byId("window").value),
  });
}

/** Tokens a second up to one sample, over the last two seconds before it. */
function rate(name, index = page.history.length - 1) {
  const last = page.history[index];
  let first = last;
  for (let at = index - 1; at >= 0; at -= 1) {
    first = page.history[at];
    if (last.at - first.at >= RATE_SECONDS) break;
  }
  const seconds = last ? last.at - first.at : 0;
  return seconds > 0 ? (last[name] - first[name]) / seconds : 0;
}

function failed(error) {
  if (error.status === 401) {
    views.showCondition("needs an API key", "bad");
    byId("key-told").textContent = page.key ? "The server does not know this key." : "";
    const form = byId("key-form");
    if (form.hidden) {
      form.hidden = false;
      byId("key").focus();
    }
    return;
  }
  page.waitMs = error.status ? POLL_MS : Math.min(SLOWEST_MS, 2 * page.waitMs);
  views.showCondition(error.status ? error.message : "no answer from the server", "bad");
  if (error.status === 503) page.props = null; // it loads, or ends
}

async function release(namespace) {
  const told = byId("release-told");
  try {
    const reply = await ask("prompt-graphs/release", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ namespace }),
    });
    told.textContent = views.releasedText((await reply.json()).released[0]);
  } catch (error) {
    told.textContent = `Nothing was released: ${error.message}`;
  }
  poll();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  page.key = byId("key").value.trim();
  sessionStorage.setItem("graphseed-key", page.key);
  poll();
});
for (const id of ["namespace", "window"]) {
  byId(id).addEventListener("change", () => draw(Date.now() / 1000));
}
document.addEventListener("visibilitychange", () => {
  clearTimeout(page.timer);
  if (!document.hidden) poll();
});
poll();
