// The page's logic: one conversation, streamed; the knobs; and the engine's figures once a second. No library, no build step.
"use strict";

const at = (id) => document.getElementById(id);
const KNOBS = ["temperature", "top_p", "min_p", "repetition_penalty"];
const COUNTS = ["top_k", "max_tokens", "seed"];
const KEPT = [...KNOBS, ...COUNTS, "system"];
const POLL_MS = 1000;

let messages = [];
let running = null; // the AbortController of the answer that is on its way

function headers() {
  const key = at("key").value.trim();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

// Settings.

function showKnob(id) {
  at(`${id}-shown`).textContent = String(Number(at(id).value));
}

function settings() {
  const chosen = {};
  for (const id of KNOBS) chosen[id] = Number(at(id).value);
  for (const id of COUNTS) if (at(id).value !== "") chosen[id] = Number(at(id).value);
  return chosen;
}

function keepSettings() {
  localStorage.setItem("pagedjax", JSON.stringify(Object.fromEntries(KEPT.map((id) => [id, at(id).value]))));
}

function recallSettings() {
  try {
    for (const [id, value] of Object.entries(JSON.parse(localStorage.getItem("pagedjax")) ?? {})) if (KEPT.includes(id)) at(id).value = value;
  } catch {
    localStorage.removeItem("pagedjax");
  }
  KNOBS.forEach(showKnob);
}

// The conversation. Whatever a model says is shown as text, never as markup.

function add(role, text) {
  at("empty").hidden = true;
  const article = document.createElement("article");
  article.className = role;
  const said = document.createElement("div");
  said.className = "said";
  said.textContent = text;
  const note = document.createElement("p");
  note.className = "note";
  note.hidden = true;
  article.append(said, note);
  at("talk").append(article);
  at("talk").scrollTop = at("talk").scrollHeight;
  return {
    article,
    append(piece) {
      const talk = at("talk");
      const follows = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 80; // who scrolled up reads there
      said.append(piece);
      if (follows) talk.scrollTop = talk.scrollHeight;
    },
    note(words) {
      note.textContent = words;
      note.hidden = false;
      at("talk").scrollTop = at("talk").scrollHeight;
    },
  };
}

async function* events(response) {
  const decoder = new TextDecoder();
  let rest = "";
  for (const reader = response.body.getReader(); ; ) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + decoder.decode(value, { stream: true })).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function failure(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered with status ${response.status}`;
  }
}

async function answer(text) {
  const system = at("system").value.trim();
  const mine = messages; // "New chat" makes another list meanwhile
  mine.push({ role: "user", content: text });
  add("user", text);
  const shown = add("assistant", "");
  shown.article.classList.add("going");
  running = new AbortController();
  at("send").hidden = true;
  at("stop").hidden = false;
  const began = performance.now();
  let first = null;
  let last = began;
  let said = "";
  let usage = null;
  let reason = null;
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...headers() },
      body: JSON.stringify({
        messages: system ? [{ role: "system", content: system }, ...mine] : mine,
        stream: true,
        stream_options: { include_usage: true },
        ...settings(),
      }),
      signal: running.signal,
    });
    if (!response.ok) throw new Error(await failure(response));
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      for (const choice of event.choices) {
        const piece = choice.delta.content;
        if (piece) {
          first ??= performance.now();
          last = performance.now();
          said += piece;
          shown.append(piece);
        }
        reason = choice.finish_reason ?? reason;
      }
    }
    shown.note(summary(usage, reason, began, first, last));
  } catch (error) {
    if (error.name === "AbortError") {
      shown.note("stopped");
    } else {
      shown.article.classList.add("wrong");
      shown.append(`${said ? "\n\n" : ""}${error.message}`);
      shown.note("not part of the conversation");
    }
  } finally {
    shown.article.classList.remove("going");
    running = null;
    at("send").hidden = false;
    at("stop").hidden = true;
  }
  if (said) mine.push({ role: "assistant", content: said });
  else mine.pop(); // a question without an answer is not asked again
}

function summary(usage, reason, began, first, last) {
  const words = [];
  if (usage) words.push(`${usage.completion_tokens} tokens`);
  if (first !== null) words.push(`first after ${((first - began) / 1000).toFixed(2)} s`);
  if (usage && first !== null && last > first) words.push(`${((usage.completion_tokens - 1) / ((last - first) / 1000)).toFixed(0)} tokens/s`);
  if (usage?.prompt_tokens_details.cached_tokens) words.push(`${usage.prompt_tokens_details.cached_tokens} of ${usage.prompt_tokens} prompt tokens cached`);
  if (reason === "length") words.push("cut at its length");
  return words.join(" · ");
}

// The engine's figures.

async function poll() {
  if (!document.hidden) {
    try {
      const response = await fetch("stats", { headers: headers() });
      if (!response.ok) throw new Error(response.status === 401 ? "the server asks for an API key: see Settings" : await failure(response));
      showFigures(await response.json());
      if (!at("model").dataset.known) await showModel();
    } catch (error) {
      delete at("model").dataset.known;
      at("model").textContent = error instanceof TypeError ? "no connection to the server" : error.message;
    }
  }
  setTimeout(poll, POLL_MS);
}

function showFigures(figures) {
  const engine = figures.engine;
  if (!engine) return; // in the middle of a long step; what was shown stays
  const share = engine.num_used_blocks / figures.num_kv_blocks;
  at("running").textContent = engine.num_running;
  at("waiting").textContent = engine.num_waiting;
  at("blocks").value = share;
  at("used").textContent = `${(share * 100).toFixed(share < 0.1 ? 1 : 0)} %`;
  at("hits").textContent = `${(engine.prefix_hit_rate * 100).toFixed(0)} %`;
  at("speed").textContent = engine.tokens_per_s.toFixed(0);
  at("blocks").title = `${engine.num_used_blocks} used, ${engine.num_cached_blocks} cached, ${engine.num_free_blocks} free`;
}

async function showModel() {
  const response = await fetch("v1/models", { headers: headers() });
  if (!response.ok) return;
  const model = (await response.json()).data[0];
  at("model").textContent = `${model.id} · up to ${model.max_model_len} tokens`;
  at("model").dataset.known = "yes";
}

// Wiring.

function fit() {
  at("text").style.height = "auto";
  at("text").style.height = `${at("text").scrollHeight}px`;
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("text").value.trim();
  if (!text || running) return;
  document.body.classList.contains("tuning") && innerWidth < 704 && at("tune").click();
  at("text").value = "";
  fit();
  answer(text);
});
at("text").addEventListener("input", fit);
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("ask").requestSubmit();
  }
});
at("stop").addEventListener("click", () => running?.abort());
at("fresh").addEventListener("click", () => {
  running?.abort();
  messages = [];
  at("talk").querySelectorAll("article").forEach((article) => article.remove());
  at("empty").hidden = false;
  at("text").focus();
});
at("tune").addEventListener("click", () => {
  const open = document.body.classList.toggle("tuning");
  at("tune").setAttribute("aria-expanded", String(open));
});
KNOBS.forEach((id) => at(id).addEventListener("input", () => showKnob(id)));
KEPT.forEach((id) => at(id).addEventListener("change", keepSettings));
recallSettings();
poll();
