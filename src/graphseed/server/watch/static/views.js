// The page's words and tables. Text of the server is only ever set as text.

const byId = (id) => document.getElementById(id);
const MAX_ROWS = 100; // of a namespace; the endpoint has them all

/** An element with properties, attributes (in `data`) and children. */
export function element(tag, properties = {}, ...children) {
  const { data = {}, ...rest } = properties;
  const made = Object.assign(document.createElement(tag), rest);
  for (const [name, value] of Object.entries(data)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export function number(value, digits = 0) {
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

/** A number with three digits that mean something. */
export function short(value) {
  if (value >= 100 || value === 0) return number(value);
  return number(value, value >= 10 ? 1 : value >= 1 ? 2 : 3);
}

export function bytes(value) {
  if (value === 0) return "0";
  const step = Math.min(3, Math.floor(Math.log2(value) / 10));
  return `${short(value / 1024 ** step)} ${["B", "KiB", "MiB", "GiB"][step]}`;
}

const percent = (part) => `${number(100 * part, part > 0 && part < 1 ? 1 : 0)} %`;

export function showCondition(text, is) {
  const shown = byId("condition");
  if (shown.textContent !== text) shown.textContent = text; // it is read out when it changes
  shown.dataset.is = is;
}

export function showFacts(props) {
  const graphs = props.prompt_graphs;
  const settings = props.default_generation_settings;
  byId("model").textContent = props.model_alias;
  document.title = `${props.model_alias} – graphseed`;
  const facts = [
    ["prompt graphs", `${graphs.policy} (by ${graphs.selected_by})`],
    ["decode graphs", graphs.decode_graphs ? "on" : "off"],
    ["device", props.device],
    ["slots", `${props.total_slots} of ${number(settings.n_ctx)} tokens`],
    ["weights", props.model_ftype],
    ["path", props.model_path],
    ["build", props.build_info],
  ];
  byId("facts").replaceChildren(
    ...facts
      .filter(([, value]) => value)
      .map(([name, value]) =>
        element("div", {}, element("dt", { textContent: name }),
          element("dd", { textContent: value })),
      ),
  );
}

/** Alarms that no replay has answered, and what the start had to say. */
export function showAlarms(told) {
  const alarms = told.alarms.filter((alarm) => alarm.is_active);
  const text = alarms.map((alarm) => alarm.message).join("\n");
  const shown = byId("alarms");
  if (shown.dataset.text !== text) {
    shown.dataset.text = text;
    shown.replaceChildren(
      ...alarms.map((alarm) =>
        element("p", { className: "notice alarm" },
          element("strong", { textContent: "Alarm: " }), alarm.message),
      ),
    );
  }
  const notes = [...told.warnings];
  if (told.policy === "off" && told.warnings.length === 0) {
    notes.push("Prompt graphs are off: every prompt runs direct. Start the server with "
      + "--prompt-graphs resident (chat, short prompts) or seed (long prompts) to capture them.");
  }
  byId("notes").replaceChildren(
    ...notes.map((note) => element("p", { className: "notice", textContent: note })),
  );
}

export function showNow(told, props, history, rate, rows) {
  const { prompt } = told.namespaces;
  byId("prompt-rate").textContent = short(rate("prompt"));
  byId("rate-more").textContent = `decode ${short(rate("decode"))} tokens/s; line: last minute`;
  byId("hit-rate").textContent = prompt.candidates ? percent(prompt.hit_rate) : "–";
  const first = history[0];
  const recent = prompt.candidates - first.candidates;
  byId("hit-more").textContent = prompt.candidates
    ? `${number(prompt.replayed)} of ${number(prompt.candidates)} prompt observations replayed`
      + (recent > 0 ? `; last minute ${percent((prompt.replayed - first.replayed) / recent)}` : "")
    : "no prompt was run yet";
  showHostTime(rows);
  const { processing, waiting } = told.requests;
  byId("requests").replaceChildren(
    number(processing), element("small", { textContent: ` of ${props.total_slots} slots` }));
  byId("requests-more").textContent = `${number(waiting)} waiting`;
}

/** Direct and replayed side by side, for the prompt identity that was replayed most. */
function showHostTime(rows) {
  const both = rows.filter((row) => row.namespace === "prompt" && row.replayed && row.direct);
  both.sort((one, other) => other.replayed - one.replayed);
  if (both.length === 0) {
    byId("host-time").textContent = "–";
    byId("host-more").textContent = "shown once a prompt graph was replayed";
    return;
  }
  const row = both[0];
  byId("host-time").replaceChildren(
    `${short(row.replay_ms)} ms`, element("small", { textContent: " replayed" }));
  byId("host-more").textContent =
    `${short(row.direct_ms)} ms direct${row.direct === 1 ? " (one run)" : ""}; `
    + `${number(row.tokens)} tokens, ${number(row.nodes)} nodes`;
}

export function showBytes(told, release) {
  const shown = byId("bytes");
  if (!shown.firstChild) shown.append(...Object.keys(told.namespaces).map((name) => held(name, release)));
  for (const [name, one] of Object.entries(told.namespaces)) {
    const limit = one.max_bytes ? ` of at most ${bytes(one.max_bytes)}` : "";
    byId(`held-${name}`).textContent = `${bytes(one.bytes)}${limit}`;
    const bar = byId(`bar-${name}`);
    const part = one.max_bytes ? Math.min(1, one.bytes / one.max_bytes) : 0;
    bar.setAttribute("aria-valuenow", String(Math.round(100 * part)));
    bar.firstChild.style.width = one.bytes ? `max(3px, ${100 * part}%)` : "0";
  }
  byId("summary").textContent = told.summary.join("\n");
}

function held(name, release) {
  const button = element("button", {
    type: "button",
    textContent: "Release",
    data: { "aria-label": `Release ${name} graphs` },
  });
  button.addEventListener("click", () => release(name));
  const amount = element("span", { id: `held-${name}` });
  const bar = element("div", {
    id: `bar-${name}`,
    className: "bar",
    data: { role: "meter", "aria-label": `${name} graphs, percent of their budget`,
      "aria-valuemin": "0", "aria-valuemax": "100", "aria-valuenow": "0" },
  }, element("div"));
  const head = element("div", { className: "held-head" }, element("b", { textContent: name }),
    amount, button);
  return element("div", { className: "held" }, head, bar);
}

export function releasedText(one) {
  if (one.entries === 0) return `No ${one.namespace} graph was held.`;
  const returned = one.bytes_returned ? `, ${bytes(one.bytes_returned)} came back` : "";
  return `${number(one.entries)} ${one.namespace} graphs released in ${short(one.ms)} ms${returned}.`;
}

const COLUMNS = [
  ["Tokens", (row) => [number(row.tokens), element("small", { textContent: row.first_node })]],
  ["Batch", (row) => number(row.batch)],
  ["State", (row) => element("span", { className: `is-${row.state}`, textContent: row.state }),
    "word"],
  ["Direct", (row) => number(row.direct)],
  ["Seeded", (row) => number(row.seeded)],
  ["Replayed", (row) => number(row.replayed)],
  ["Nodes", (row) => (row.nodes ? number(row.nodes) : "–")],
  ["Bytes", (row) => bytes(row.bytes)],
  ["Capture ms", (row) => (row.seeded ? short(row.capture_ms + row.instantiate_ms) : "–")],
  ["Direct ms", (row) => (row.direct ? short(row.direct_ms) : "–")],
  ["Replay ms", (row) => (row.replayed ? short(row.replay_ms) : "–")],
  ["Last reason", (row) => row.last_reason || "–", "word reason"],
];

// Roles are said, because on narrow screens the table is laid out as cards.
export function showIdentities(rows) {
  const table = byId("identities");
  if (rows.length === 0) {
    table.replaceChildren();
    byId("identities-told").textContent = "None was seen yet.";
    return;
  }
  const head = COLUMNS.map(([name, , kind]) =>
    element("th", { textContent: name, className: kind || "", scope: "col",
      data: { role: "columnheader" } }));
  const bodies = [];
  let numHidden = 0;
  for (const namespace of ["prompt", "decode"]) {
    const own = rows.filter((row) => row.namespace === namespace);
    if (own.length === 0) continue;
    own.sort((one, other) => one.tokens - other.tokens || one.batch - other.batch
      || one.id - other.id);
    numHidden += Math.max(0, own.length - MAX_ROWS);
    const group = element("tr", { className: "group", data: { role: "row" } },
      element("th", { textContent: namespace, colSpan: COLUMNS.length, scope: "rowgroup",
        data: { role: "rowheader" } }));
    bodies.push(element("tbody", { data: { role: "rowgroup" } }, group,
      ...own.slice(0, MAX_ROWS).map(line)));
  }
  table.replaceChildren(
    element("thead", { data: { role: "rowgroup" } },
      element("tr", { data: { role: "row" } }, ...head)),
    ...bodies);
  byId("identities-told").textContent = numHidden
    ? `${number(rows.length)} seen; ${number(numHidden)} are only in /prompt-graphs`
    : `${number(rows.length)} seen`;
}

function line(row) {
  const cells = COLUMNS.map(([name, make, kind]) =>
    element("td", { className: kind || "", data: { "data-name": name, role: "cell" } },
      ...[make(row)].flat()));
  return element("tr", { title: row.identity, data: { role: "row" } }, ...cells);
}
