// What both views share: elements, the API key, the phases of the ledger, and which view is shown.
// Text only ever enters the page as text (textContent), so nothing that a model says can become HTML.

const $ = (id) => document.getElementById(id);

function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

// Text that is announced when it changes must not be written anew when it does not.
function say(id, text) {
  if ($(id).textContent !== text) $(id).textContent = text;
}

const ms = (value) =>
  value >= 999.5 ? `${(value / 1000).toFixed(2)} s` : value >= 99.5 ? `${Math.round(value)} ms` : `${value.toFixed(1)} ms`;
const counted = (count, what) => `${count} ${what}${count === 1 ? "" : "s"}`;
const share = (part) => `${Math.round(100 * part)} %`;
const sum = (values) => values.reduce((total, value) => total + value, 0);

// The ledger's phases: a name for people, and the colour.
const PHASES = {
  receive: ["read", "intake"], grammar: ["grammar", "intake"], tokenize: ["tokenize", "intake"],
  transport: ["between processes", "transport"],
  queue_policy: ["queue: others first", "queue-policy"], queue_window: ["queue: window", "queue-window"],
  queue_adapter: ["queue: adapter", "queue-blocks"],
  queue_capacity: ["queue: capacity", "queue-capacity"], queue_blocks: ["queue: KV blocks", "queue-blocks"],
  prefill_compute: ["prefill", "prefill-compute"], prefill_stall: ["prefill stalled", "prefill-stall"],
  decode_compute: ["decode", "decode-compute"], draft: ["drafts made", "verify"], verify: ["drafts tried", "verify"],
  decode_stall_prefill: ["stalled by prompts", "decode-stall"],
  decode_stall_logprobs: ["stalled by logprobs", "decode-stall"],
  decode_stall_policy: ["left out", "decode-stall"],
  decode_stall_preempted: ["preempted", "preempted"], decode_stall_recompute: ["recomputing", "preempted"],
  sampling: ["sampling", "sampling"], schedule: ["schedule", "schedule"],
  step_retry: ["step retried", "lost"], engine_lost: ["engine lost", "lost"], engine_restart: ["engine restart", "lost"],
  route: ["route", "intake"], network: ["network", "transport"], backend: ["backend", "schedule"],
  kv_transfer: ["KV transfer", "transport"],
  detokenize: ["detokenize", "output"], send: ["send", "output"], send_blocked: ["client slow", "send-blocked"],
};
const nameOf = (phase) => (PHASES[phase] || [phase])[0];
const colourOf = (phase) => `var(--${(PHASES[phase] || ["", "schedule"])[1]})`;
const FIRST_TOKEN = ["receive", "grammar", "tokenize", "transport", "queue_policy", "queue_window", "queue_capacity",
  "queue_blocks", "queue_adapter", "prefill_compute", "prefill_stall"];

function legendEntry(colour, text) {
  const entry = element("li"), swatch = element("i");
  swatch.style.background = colour;
  entry.append(swatch, text);
  return entry;
}

// A strip of phases: [phase, ms] pairs, the same as text for who does not see it, and a legend with the largest.
function ledgerStrip(pairs, what, most = 8) {
  const total = sum(pairs.map(([, length]) => length)) || 1;
  const strip = element("div", "strip");
  strip.setAttribute("role", "img");
  for (const [phase, length] of pairs) {
    const part = element("span");
    part.style.background = colourOf(phase);
    part.style.flex = `${length} 0 0`;
    part.title = `${nameOf(phase)}: ${ms(length)}`;
    strip.append(part);
  }
  const largest = pairs.filter(([, length]) => length >= 0.05).sort((a, b) => b[1] - a[1]).slice(0, most);
  strip.setAttribute("aria-label", `${what}: ` + largest.map(([p, l]) => `${nameOf(p)} ${share(l / total)}`).join(", "));
  const legend = element("ul", "legend");
  for (const [phase, length] of largest) legend.append(legendEntry(colourOf(phase), `${nameOf(phase)} ${ms(length)}`));
  return [strip, legend];
}

// --- the key -----------------------------------------------------------------------------------------

class Refused extends Error {}

async function call(path, options = {}) {
  const key = sessionStorage.getItem("key"), headers = { ...options.headers };
  if (key) headers.authorization = `Bearer ${key}`;
  const answer = await fetch(path, { ...options, headers });
  if (answer.ok) return answer;
  if (answer.status === 401) {
    askForKey(key ? "The server does not accept this key." : "");
    throw new Refused("The server needs an API key.");
  }
  let said = `The server answered ${answer.status}.`;
  try {
    said = (await answer.json()).error.message;
  } catch { /* it is no error object */ }
  throw new Refused(said);
}

function askForKey(said) {
  $("chat").hidden = $("live").hidden = true;
  $("key-form").hidden = false;
  $("key-said").textContent = said;
  $("key").focus();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", $("key").value.trim());
  enter();
});

// The events of a stream, each as an object, with the time at which it came.
async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const came = performance.now(), parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ") || part === "data: [DONE]") continue;
      const object = JSON.parse(part.slice(6));
      if (object.error) throw new Refused(object.error.message);
      yield [object, came];
    }
  }
}

// --- the views ---------------------------------------------------------------------------------------

let model = "", playing = null; // what plays a recording in place of a server

async function enter() {
  try {
    model = (await (await call("v1/models")).json()).data[0].id;
  } catch (error) {
    if ($("key-form").hidden) {
      $("model").textContent = error instanceof Refused ? error.message : "The server cannot be reached.";
      setTimeout(enter, 2000);
    }
    return;
  }
  $("key-form").hidden = true;
  $("model").textContent = model;
  show();
}

function show() {
  const isLive = location.hash === "#live";
  $("chat").hidden = isLive;
  $("live").hidden = !isLive;
  $("to-live").toggleAttribute("aria-current", isLive);
  $("to-chat").toggleAttribute("aria-current", !isLive);
  for (const link of [$("to-live"), $("to-chat")]) if (link.hasAttribute("aria-current")) link.setAttribute("aria-current", "page");
  document.title = `${isLive ? "Live" : "Chat"} – ${model} – Headway`;
  if (isLive) watch();
  else stopWatching();
}

window.addEventListener("hashchange", () => { if (model && !playing) show(); });
