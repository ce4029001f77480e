// The chat: streams answers, and shows the latency of each token and where the time of an answer has gone.

// Latencies that differ by less are no different to the eye.
const SEEN_MS = 8;

let conversation = [], asking = null;

const PARAMETERS = { temperature: Number, top_p: Number, max_tokens: Number, seed: Number, service_class: String };

function chatBody() {
  const body = { model, stream: true, include_timings: true, stream_options: { include_usage: true } };
  for (const [name, kind] of Object.entries(PARAMETERS)) {
    const given = $(name).value.trim();
    if (given) body[name] = kind(given);
  }
  const system = $("system").value.trim();
  body.messages = [...(system ? [{ role: "system", content: system }] : []), ...conversation];
  return body;
}

function addMessage(who, className) {
  $("nothing").hidden = true;
  const made = element("article", `message ${className}`);
  made.append(element("h3", "", who));
  $("messages").append(made);
  return made;
}

// An answer as it grows. Its tokens can be walked with the arrow keys, so that each latency can be read without a mouse.
class AnswerView {
  constructor() {
    this.element = addMessage(model, "answer");
    this.text = element("p", "text");
    this.text.tabIndex = 0;
    this.text.setAttribute("role", "group");
    this.text.setAttribute("aria-label", "Answer. Left and right arrow keys walk its tokens.");
    this.said = element("p", "said");
    this.said.setAttribute("aria-live", "polite");
    this.said.textContent = "Click a token, or walk with the arrow keys, to see its latency.";
    this.element.append(this.text, this.said);
    this.tokens = [];
    this.chosen = -1;
    this.began = this.last = performance.now();
    this.text.addEventListener("keydown", (event) => this.walk(event));
    this.text.addEventListener("click", (event) => this.choose(this.tokens.findIndex((each) => each.span === event.target)));
  }

  add(text, came, isReasoning) {
    const span = element("span", isReasoning ? "reasoning" : "", text), latency = came - this.last;
    this.last = came;
    this.tokens.push({ span, latency });
    const gaps = this.tokens.slice(1).map((each) => each.latency).sort((a, b) => a - b);
    const usual = gaps.length ? gaps[gaps.length >> 1] : latency, times = latency / Math.max(usual, 1);
    if (this.tokens.length > 2 && times > 1.5 && latency - usual > SEEN_MS) span.classList.add(times > 5 ? "slow3" : times > 2.5 ? "slow2" : "slow1");
    span.title = this.describe(this.tokens.length - 1);
    this.text.append(span);
  }

  describe(at) {
    return at ? `token ${at + 1}: ${ms(this.tokens[at].latency)} after the one before`
      : `token 1: ${ms(this.tokens[0].latency)} after it was asked for`;
  }

  walk(event) {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by || !this.tokens.length) return;
    event.preventDefault();
    this.choose(Math.min(Math.max(this.chosen + by, 0), this.tokens.length - 1));
  }

  choose(at) {
    if (at < 0) return;
    if (this.chosen >= 0) this.tokens[this.chosen].span.classList.remove("chosen");
    this.chosen = at;
    this.tokens[at].span.classList.add("chosen");
    this.said.textContent = `“${this.tokens[at].span.textContent}”, ${this.describe(at)}`;
  }

  fail(message) {
    const said = element("p", "error", message);
    said.setAttribute("role", "alert");
    this.element.append(said);
  }

  end(timings, usage) {
    if (!timings) return;
    const pairs = Object.entries(timings.phases_ns).map(([phase, length]) => [phase, length / 1e6]);
    const perToken = timings.tokens > 1 ? (timings.e2e_ns - timings.ttft_ns) / 1e6 / (timings.tokens - 1) : 0;
    const cached = usage && usage.prompt_tokens_details ? usage.prompt_tokens_details.cached_tokens : 0;
    const parts = [`${ms(timings.e2e_ns / 1e6)} in all`, `first token after ${ms(timings.ttft_ns / 1e6)}`];
    if (perToken) parts.push(`${ms(perToken)} a token`);
    parts.push(`${timings.tokens} tokens`);
    if (usage) parts.push(`prompt of ${usage.prompt_tokens}${cached ? `, ${cached} cached` : ""}`);
    if (timings.ttft_met === false) parts.push("TTFT objective missed");
    if (timings.tpot_met === false) parts.push("TPOT objective missed");
    if (timings.e2e_met === false) parts.push("E2E objective missed");
    this.element.append(element("p", "said", parts.join(" · ")), ...ledgerStrip(pairs, "Ledger of this answer"));
  }
}

// Keep the end of the answer in view, unless the reader has scrolled up.
function follow() {
  const page = document.documentElement;
  if (page.scrollHeight - page.scrollTop - page.clientHeight < 160) page.scrollTop = page.scrollHeight;
}

async function ask() {
  const text = $("text").value.trim();
  if (!text || asking) return;
  const mine = conversation;
  mine.push({ role: "user", content: text });
  addMessage("You", "question").append(element("p", "", text));
  $("text").value = "";
  asking = new AbortController();
  $("send").disabled = !($("stop").disabled = false);
  $("messages").setAttribute("aria-busy", "true");
  const view = new AnswerView();
  document.documentElement.scrollTop = document.documentElement.scrollHeight;
  let said = "", timings = null, usage = null;
  try {
    const options = { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(chatBody()), signal: asking.signal };
    for await (const [chunk, came] of eventsOf(await call("v1/chat/completions", options))) {
      timings = chunk.timings || timings;
      usage = chunk.usage || usage;
      const delta = chunk.choices.length ? chunk.choices[0].delta : {};
      if (delta.reasoning_content) view.add(delta.reasoning_content, came, true);
      if (delta.content) {
        said += delta.content;
        view.add(delta.content, came, false);
      }
      follow();
    }
    view.end(timings, usage);
  } catch (error) {
    if (error.name === "AbortError") view.said.textContent = "Stopped. The server gives no ledger of an answer that is broken off.";
    else view.fail(error instanceof Refused ? error.message : "The connection to the server was lost.");
  }
  if (said) mine.push({ role: "assistant", content: said });
  else mine.pop();
  asking = null;
  $("send").disabled = !($("stop").disabled = true);
  $("messages").removeAttribute("aria-busy");
  follow();
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});
$("stop").addEventListener("click", () => asking && asking.abort());
$("fresh").addEventListener("click", () => {
  if (asking) asking.abort();
  conversation = [];
  $("messages").replaceChildren($("nothing"));
  $("nothing").hidden = false;
  $("text").focus();
});
const showTimes = () => $("messages").classList.toggle("timed", $("timed").checked);
$("timed").addEventListener("change", showTimes);
showTimes();
