// The small chat box: one request at a time, streamed, with what the server says it took.

import { element, number, short } from "./views.js";

const byId = (id) => document.getElementById(id);

export class Chat {
  /** `ask` asks the server; `changed` is called when an answer has begun and ended. */
  constructor(ask, changed) {
    this.ask = ask;
    this.changed = changed;
    this.turns = []; // what was said, for the chat endpoint
    this.stopper = null;
    byId("chat").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        byId("chat").requestSubmit();
      }
    });
    byId("stop").addEventListener("click", () => this.stopper?.abort());
    byId("clear").addEventListener("click", () => {
      this.stopper?.abort();
      this.turns = [];
      byId("messages").replaceChildren();
      byId("prompt").focus();
    });
  }

  /** A model without a chat template is asked to continue text. */
  learn(props) {
    if (this.turns.length === 0) byId("chat-mode").value = props.chat_template ? "chat" : "text";
  }

  async #send() {
    const prompt = byId("prompt").value;
    if (this.stopper || !prompt.trim()) return;
    const isChat = byId("chat-mode").value === "chat";
    const shown = this.#message(isChat ? "You" : "Text", prompt);
    const answer = this.#message(isChat ? "Model" : "Continued", "");
    this.stopper = new AbortController();
    this.#busy(true);
    let text = "";
    try {
      const reply = await this.#ask(isChat, prompt);
      this.changed();
      for await (const event of events(reply.body)) {
        if (event.error) throw new Error(event.error.message);
        const piece = isChat ? event.choices?.[0]?.delta?.content : event.content;
        if (piece) {
          text += piece;
          answer.body.textContent = text;
          this.#toEnd();
        }
        if (event.timings) answer.timings = event.timings;
      }
      if (answer.timings) answer.box.append(timingsList(answer.timings));
      if (isChat) this.turns.push(said("user", prompt), said("assistant", text));
      byId("prompt").value = "";
      byId("chat-told").textContent = "Answered.";
    } catch (error) {
      const isStopped = error.name === "AbortError";
      byId("chat-told").textContent = isStopped ? "Stopped." : `No answer: ${error.message}`;
      if (!text) {
        shown.box.remove();
        answer.box.remove();
      }
    } finally {
      this.stopper = null;
      this.#busy(false);
      this.#toEnd();
      this.changed();
    }
  }

  #ask(isChat, prompt) {
    const common = { stream: true, temperature: Number(byId("temperature").value) };
    const count = Number(byId("max-tokens").value) || 64;
    const body = isChat
      ? { ...common, messages: [...this.turns, said("user", prompt)], max_tokens: count }
      : { ...common, prompt, n_predict: count };
    return this.ask(isChat ? "v1/chat/completions" : "completion", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal: this.stopper.signal,
    });
  }

  #message(who, text) {
    const body = element("p", { textContent: text });
    const box = element("div", { className: "message" },
      element("p", { className: "who", textContent: who }), body);
    byId("messages").append(box);
    this.#toEnd();
    return { box, body };
  }

  #toEnd() {
    const messages = byId("messages");
    messages.scrollTop = messages.scrollHeight;
  }

  #busy(isBusy) {
    byId("send").disabled = isBusy;
    byId("stop").disabled = !isBusy;
    byId("messages").setAttribute("aria-busy", String(isBusy));
    if (isBusy) byId("chat-told").textContent = "Answering.";
  }
}

const said = (role, content) => ({ role, content });

/** The events of a stream, parsed; comments and the end mark are passed over. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      const data = frame.split("\n").filter((line) => line.startsWith("data: "))
        .map((line) => line.slice(6)).join("\n");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function timingsList(at) {
  const seen = at.prompt_observations === undefined ? null
    : `${number(at.prompt_observations)}: ${number(at.prompt_seeded)} seeded, `
      + `${number(at.prompt_replayed)} replayed`;
  const rows = [
    ["queue", at.queue_ms === undefined ? null : `${short(at.queue_ms)} ms`],
    ["prompt", `${number(at.prompt_n)} tokens in ${short(at.prompt_ms)} ms, `
      + `${short(at.prompt_per_second)} tokens/s`],
    ["reused", at.cache_n ? `${number(at.cache_n)} tokens` : null],
    ["observations", seen],
    ["answer", `${number(at.predicted_n)} tokens in ${short(at.predicted_ms)} ms, `
      + `${short(at.predicted_per_second)} tokens/s`],
  ];
  return element("dl", { className: "timings" },
    ...rows.filter(([, value]) => value !== null).flatMap(([name, value]) => [
      element("dt", { textContent: name }), element("dd", { textContent: value })]));
}
