// The timeline of observations, and the small line of the last minute. Draws what it is given.

import { element, number, short } from "./views.js";

export const KINDS = ["direct", "seeded", "replayed", "refused", "released"];
const ROW_HEIGHT = 26;
const AXIS_HEIGHT = 20;
const NEAR_PIXELS = 12;

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** A canvas of the size it is shown in, sharp on every screen; returns its context. */
function fitted(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas;
  const scale = window.devicePixelRatio || 1;
  const isSame = canvas.width === Math.round(width * scale)
    && canvas.height === Math.round(height * scale);
  if (!isSame) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

/** One mark: each kind has a shape, so that colour is not all that tells them apart. */
function mark(context, kind, x, y, size) {
  context.fillStyle = context.strokeStyle = style(`--${kind}`);
  context.lineWidth = 2;
  context.beginPath();
  switch (kind) {
    case "direct": // a thin line
      context.fillRect(x - 1, y - size, 2, 2 * size);
      return;
    case "replayed": // a block
      context.fillRect(x - 2, y - size, 4, 2 * size);
      return;
    case "seeded": // a diamond
      context.moveTo(x, y - 7);
      context.lineTo(x + 5, y);
      context.lineTo(x, y + 7);
      context.lineTo(x - 5, y);
      context.closePath();
      context.fill();
      return;
    case "refused": // a cross
      context.moveTo(x - 4.5, y - 4.5);
      context.lineTo(x + 4.5, y + 4.5);
      context.moveTo(x + 4.5, y - 4.5);
      context.lineTo(x - 4.5, y + 4.5);
      context.stroke();
      return;
    default: // released: an open triangle that points down
      context.moveTo(x - 5, y - 4);
      context.lineTo(x + 5, y - 4);
      context.lineTo(x, y + 5);
      context.closePath();
      context.stroke();
  }
}

export class Timeline {
  /** A row for each kind, labelled by the legend beside it; `picked` tells of one observation. */
  constructor(canvas, legend, picked) {
    this.canvas = canvas;
    this.picked = picked;
    this.all = [];
    this.counts = new Map();
    this.shown = []; // observations in view, oldest first
    this.chosen = null;
    this.view = { now: 0, namespace: "prompt", seconds: 60 };
    this.swatches = new Map();
    for (const kind of KINDS) {
      const swatch = element("canvas", { data: { "aria-hidden": "true" } });
      const count = element("b", { textContent: "0" });
      legend.append(element("li", {}, swatch, kind, count));
      this.swatches.set(kind, swatch);
      this.counts.set(kind, count);
    }
    canvas.addEventListener("pointermove", (event) => this.#point(event));
    canvas.addEventListener("pointerdown", (event) => this.#point(event));
    canvas.addEventListener("keydown", (event) => this.#key(event));
    const again = () => this.draw(this.all, this.view);
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
    new ResizeObserver(again).observe(canvas);
  }

  draw(observations, view) {
    this.all = observations;
    this.view = view;
    const from = view.now - view.seconds;
    this.shown = observations.filter(
      (one) => one.namespace === view.namespace && one.at >= from && one.at <= view.now + 1);
    if (this.chosen && !this.shown.includes(this.chosen)) this.chosen = null;
    const { context, width, height } = fitted(this.canvas);
    this.#grid(context, width, height);
    const most = Math.max(1, ...this.shown.map((one) => one.tokens / one.count));
    for (const one of this.shown) {
      const part = Math.log2(1 + one.tokens / one.count) / Math.log2(1 + most);
      mark(context, one.kind, this.#x(one, width), this.#y(one), 4 + 7 * part);
    }
    if (this.chosen) this.#ring(context, width);
    this.#count();
  }

  #x(one, width) {
    const age = Math.max(0, this.view.now - one.at);
    return 8 + (1 - age / this.view.seconds) * (width - 16);
  }

  #y(one) {
    return (KINDS.indexOf(one.kind) + 0.5) * ROW_HEIGHT;
  }

  #grid(context, width, height) {
    context.strokeStyle = style("--grid");
    context.lineWidth = 1;
    for (let row = 1; row <= KINDS.length; row += 1) {
      context.beginPath();
      context.moveTo(0, row * ROW_HEIGHT - 0.5);
      context.lineTo(width, row * ROW_HEIGHT - 0.5);
      context.stroke();
    }
    context.fillStyle = style("--muted");
    context.font = "11px system-ui, sans-serif";
    const { seconds } = this.view;
    for (const part of [0, 0.25, 0.5, 0.75, 1]) {
      const x = 8 + part * (width - 16);
      context.textAlign = part === 0 ? "left" : part === 1 ? "right" : "center";
      const age = seconds * (1 - part);
      const text = age === 0 ? "now" : seconds <= 60 ? `${age} s` : clock(age);
      context.fillText(text, part === 0 ? 0 : part === 1 ? width : x, height - 5);
      context.beginPath();
      context.moveTo(x, 0);
      context.lineTo(x, height - AXIS_HEIGHT);
      context.stroke();
    }
  }

  #ring(context, width) {
    context.strokeStyle = style("--text");
    context.lineWidth = 1.5;
    context.strokeRect(this.#x(this.chosen, width) - 7, this.#y(this.chosen) - 12, 14, 24);
  }

  #count() {
    const counts = Object.fromEntries(KINDS.map((kind) => [kind, 0]));
    for (const one of this.shown) counts[one.kind] += one.count;
    for (const kind of KINDS) {
      this.counts.get(kind).textContent = number(counts[kind]);
      const { context, width, height } = fitted(this.swatches.get(kind));
      mark(context, kind, width / 2, height / 2, 5);
    }
    const { namespace, seconds } = this.view;
    document.getElementById("timeline-text").textContent =
      `${namespace} observations of the last ${seconds} seconds: `
      + KINDS.map((kind) => `${counts[kind]} ${kind}`).join(", ");
  }

  #point(event) {
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    let best = null;
    let least = NEAR_PIXELS;
    for (const one of this.shown) {
      const away = Math.hypot(this.#x(one, box.width) - x, (this.#y(one) - y) / 2);
      if (away <= least) [best, least] = [one, away];
    }
    if (best) this.#choose(best);
  }

  #key(event) {
    const last = this.shown.length - 1;
    const at = this.chosen ? this.shown.indexOf(this.chosen) : last + 1;
    const next = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last }[event.key];
    if (next === undefined || last < 0) return;
    event.preventDefault();
    this.#choose(this.shown[Math.min(last, Math.max(0, next))]);
  }

  #choose(one) {
    if (one === this.chosen) return;
    this.chosen = one;
    this.picked.textContent = described(one);
    this.draw(this.all, this.view);
  }
}

/** Minutes and seconds. */
function clock(seconds) {
  return `${Math.floor(seconds / 60)}:${String(Math.round(seconds % 60)).padStart(2, "0")}`;
}

/** One observation in words. */
function described(one) {
  const time = new Date(one.at * 1000).toLocaleTimeString("en", {
    hour12: false, hour: "2-digit", minute: "2-digit", second: "2-digit",
    fractionalSecondDigits: 1,
  });
  const parts = [`${time} ${one.namespace} ${one.kind}`];
  if (one.count > 1) parts.push(`${number(one.count)} steps`);
  if (one.tokens) parts.push(`${number(one.tokens)} tokens`);
  if (one.host_ms) parts.push(`host ${short(one.host_ms / one.count)} ms`);
  if (one.capture_ms) parts.push(`capture ${short(one.capture_ms)} ms`);
  if (one.why) parts.push(one.why);
  return parts.join(", ");
}

export class Spark {
  /** A line of values, the last at the right. */
  constructor(canvas) {
    this.canvas = canvas;
  }

  draw(values) {
    const { context, width, height } = fitted(this.canvas);
    const most = Math.max(1, ...values);
    context.strokeStyle = style("--grid");
    context.beginPath();
    context.moveTo(0, height - 1);
    context.lineTo(width, height - 1);
    context.stroke();
    context.strokeStyle = style("--replayed");
    context.lineWidth = 1.5;
    context.beginPath();
    values.forEach((value, index) => {
      const x = width - 1 - (values.length - 1 - index) * (width / 60);
      context.lineTo(x, height - 2 - (value / most) * (height - 5));
    });
    context.stroke();
  }
}
