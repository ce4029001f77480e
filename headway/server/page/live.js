// Live: what the server does now. One stream of looks at the engine, drawn on canvases, each with a caption that says the
// same in words. The server looks only while somebody watches, so leaving the view ends the stream.

const WINDOWS_MS = [2000, 5000, 10000, 20000], WINDOW_MS = 20000, MOST_ROWS = 40, MOST_ENDED = 500, ROW = 13, CORES_LOOKS = 11;

let watching = null, paused = false;
let rows = new Map(), ended = [], steps = [], looks = [], about = {}, latest = null, offset = 0;

async function watch() {
  if (watching) return;
  watching = new AbortController();
  const mine = watching;
  while (watching === mine) {
    try {
      const answer = await call("debug/live", { signal: mine.signal });
      for await (const [look] of eventsOf(answer)) if (watching === mine) take(look);
      say("live-said", "The server has ended the stream; trying again");
    } catch (error) {
      if (error.name === "AbortError") return;
      say("live-said", error instanceof Refused ? error.message : "The server cannot be reached; trying again");
    }
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}

function stopWatching() {
  if (watching) watching.abort();
  watching = null;
}

function take(look) {
  const ahead = look.at_ms - performance.now(); // of the page's clock; a look that came late must not turn time back
  offset = latest ? Math.max(offset - 0.5, ahead) : ahead;
  say("live-said", paused ? "Paused" : look.state === "ready" ? "Live" : `The engine is ${look.state}`);
  $("tuned").hidden = !look.auto_tune;
  say("tuned", look.auto_tune || "");
  gather(look);
  if (!paused) showLook();
}

const nowMs = () => (playing ? playing.now() : performance.now() + offset); // on the engine's clock

function gather(look) {
  if (look.about) about = look.about;
  for (const each of look.sequences) grow(each, look.at_ms);
  for (const each of look.ended) close(each);
  steps = [...steps, ...look.steps].slice(-120);
  looks = [...looks, { cpu: look.engine_cpu_ms, steps: look.steps_ms }].slice(-CORES_LOOKS);
  for (const [id, row] of rows) if (row.to < look.at_ms - WINDOW_MS) rows.delete(id);
  latest = look;
}

// --- timelines ---------------------------------------------------------------------------------------

function rowOf(id, name, arrived) {
  if (!rows.has(id)) rows.set(id, { name, parts: [], known: {}, from: arrived, to: arrived, isOver: false });
  return rows.get(id);
}

// What a row's phases have gained since the last look, one after the other from where it ended.
function extend(row, phases, until) {
  for (const [phase, length] of Object.entries(phases)) {
    const gained = length - (row.known[phase] || 0);
    if (gained <= 0) continue;
    const last = row.parts[row.parts.length - 1], from = row.to;
    row.to = Math.min(row.to + gained, until);
    row.known[phase] = length;
    if (last && last.phase === phase) last.to = row.to;
    else row.parts.push({ phase, from, to: row.to });
  }
}

function grow(sequence, now) {
  const row = rowOf(sequence.id, `${sequence.id.slice(0, 6)} ${sequence.service_class}`, sequence.arrived_ms);
  const inEngine = sum(Object.values(sequence.phases_ms));
  if (!row.parts.length) extend(row, { receive: Math.max(0, now - sequence.arrived_ms - inEngine) }, now);
  extend(row, sequence.phases_ms, now);
}

function close(answer) {
  const row = rowOf(answer.id, `${answer.id.slice(0, 6)} ${answer.service_class}`, answer.arrived_ms);
  // What came before the engine was drawn as one part when the row began.
  if (row.parts.length) for (const each of ["receive", "grammar", "tokenize"]) row.known[each] = answer.phases_ms[each];
  extend(row, answer.phases_ms, answer.arrived_ms + answer.e2e_ms);
  row.isOver = true;
  row.failed = !["stop", "length"].includes(answer.reason);
  ended.push(answer);
  if (ended.length > MOST_ENDED) ended.shift();
}

// --- drawing -----------------------------------------------------------------------------------------

// Colours of the style sheet for canvases, read anew when light and dark change.
let resolved = {};
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { resolved = {}; });
function ink(name) {
  return (resolved[name] ||= getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
}
const phaseInk = (phase) => ink((PHASES[phase] || ["", "schedule"])[1]);

// A canvas of so many CSS pixels in height, cleared, in device pixels.
function surface(id, height) {
  const canvas = $(id), width = canvas.clientWidth, ratio = window.devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "11px system-ui, sans-serif";
  return [context, width];
}

function drawTimelines() {
  const now = nowMs(), all = [...rows.values()].sort((a, b) => a.from - b.from);
  const shown = all.slice(-MOST_ROWS), narrow = $("timelines").clientWidth < 500, left = narrow ? 58 : 120;
  const [context, width] = surface("timelines", Math.max(6, shown.length) * ROW + 16);
  const oldest = shown.length ? now - shown[0].from : 0, span = WINDOWS_MS.find((each) => each >= oldest) || WINDOW_MS;
  const x = (at) => left + ((width - left) * (at - now + span)) / span;
  context.fillStyle = ink("muted");
  for (let back = 0; back <= span; back += span / 4) {
    const at = x(now - back), words = back ? `−${back / 1000} s` : "now";
    context.fillText(words, Math.min(Math.max(at - 12, left), width - 24), shown.length > 6 ? shown.length * ROW + 13 : 6 * ROW + 13);
    context.fillRect(at, 0, 0.5, Math.max(6, shown.length) * ROW);
  }
  shown.forEach((row, at) => {
    const y = at * ROW;
    for (const part of row.parts) {
      const from = Math.max(x(part.from), left), to = x(part.to);
      if (to <= left) continue;
      context.fillStyle = phaseInk(part.phase);
      context.fillRect(from, y + 1, Math.max(to - from, 0.7), ROW - 2);
    }
    if (!row.isOver) { // its phases since the last look are not known yet
      context.fillStyle = ink("line");
      context.fillRect(Math.max(x(row.to), left), y + ROW / 2 - 0.5, Math.max(0, x(now) - Math.max(x(row.to), left)), 1);
    }
    context.fillStyle = row.failed ? ink("bad") : ink("ink");
    context.fillText(narrow ? row.name.slice(0, 6) : row.name.slice(0, 18), 0, y + ROW - 3);
  });
}

function drawSteps() {
  const [context, width] = surface("steps", 130), shown = steps.slice(-Math.floor(width / 5)), height = 126;
  const top = Math.max(...shown.map((each) => Math.max(each.took_ms, each.predicted_ms)), 1e-3), y = (value) => height - (height - 8) * value / top;
  context.fillStyle = ink("muted");
  context.fillText(ms(top), 0, 9);
  shown.forEach((step, at) => {
    const x = width - (shown.length - at) * 5, tokens = step.decoding + step.prompt_tokens || 1;
    const prompt = (height - y(step.took_ms)) * (step.prompt_tokens / tokens);
    context.fillStyle = ink("prefill-compute");
    context.fillRect(x, height - prompt, 4, prompt);
    context.fillStyle = ink("decode-compute");
    context.fillRect(x, y(step.took_ms), 4, height - prompt - y(step.took_ms));
    context.fillStyle = ink("ink");
    if (step.predicted_ms) context.fillRect(x, y(step.predicted_ms) - 1, 4, 2);
    context.fillStyle = ink("lost");
    if (step.least_ms) context.fillRect(x, y(step.least_ms) - 1, 4, 2);
  });
}

function drawBlocks() {
  const { blocks = 1 } = about, cell = 9, [context, wide] = surface("kv", 130), across = Math.max(1, Math.floor(wide / cell));
  const each = Math.max(1, Math.ceil(blocks / (across * 14))), cells = Math.ceil(blocks / each);
  let at = 0, number = 0, told = 0;
  const fill = (count, colour) => {
    for (const end = Math.min(cells, at + Math.round(count / each)); at < end; at++) {
      context.fillStyle = colour;
      context.fillRect((at % across) * cell, Math.floor(at / across) * cell, cell - 1, cell - 1);
    }
  };
  for (const sequence of latest.sequences) {
    fill(sequence.blocks, ink(number++ % 2 ? "decode-compute" : "prefill-compute"));
    told += sequence.blocks;
  }
  fill(Math.max(0, latest.used_blocks - told), ink("transport"));
  fill(latest.cached_blocks, ink("queue-policy"));
  fill(blocks, ink("line"));
}

// --- words -------------------------------------------------------------------------------------------

// Processor time of the engine / time of its steps: with a core for each thread about the threads, and less where it lacks them.
function coresOfSteps() {
  const first = looks[0], last = looks[looks.length - 1], took = last.steps - first.steps;
  return took >= 100 && last.cpu !== null && last.cpu >= first.cpu ? (last.cpu - first.cpu) / took : null;
}

const quantile = (values, at) => values[Math.min(values.length - 1, Math.floor(values.length * at))];

function tell() {
  const spans = steps.length > 1 ? latest.at_ms - steps[0].at_ms : 0, recent = steps.filter((each) => each.at_ms > latest.at_ms - 5000);
  const rate = recent.length > 1 ? (1000 * sum(recent.map((each) => each.decoding))) / Math.max(latest.at_ms - recent[0].at_ms, 1) : 0;
  const cores = coresOfSteps(), ttft = ended.filter((each) => each.ttft_ms !== null).map((each) => each.ttft_ms).sort((a, b) => a - b);
  const figures = {
    running: latest.running, waiting: latest.waiting, "decoded tokens/s": spans ? Math.round(rate) : 0,
    "KV in use": share(latest.used_blocks / (about.blocks || 1)),
    "TTFT P50": ttft.length ? ms(quantile(ttft, 0.5)) : "–", "TTFT P99": ttft.length ? ms(quantile(ttft, 0.99)) : "–",
    "cores in steps": cores === null ? "–" : cores.toFixed(2), "clients behind": latest.clients_behind ?? "–",
  };
  $("figures").replaceChildren(...Object.entries(figures).map(([name, value]) => {
    const pair = element("div");
    pair.append(element("dt", "", name), element("dd", "", `${value}`));
    return pair;
  }));
  const shown = [...rows.values()].slice(-MOST_ROWS), phases = new Set(shown.flatMap((row) => row.parts.map((part) => part.phase)));
  const groups = new Map();
  for (const phase of Object.keys(PHASES)) {
    if (phases.has(phase)) groups.set(colourOf(phase), [...(groups.get(colourOf(phase)) || []), nameOf(phase)]);
  }
  $("phases").replaceChildren(...[...groups].map(([colour, names]) => legendEntry(colour, names.join(", "))));
  const more = latest.running + latest.waiting - latest.sequences.length;
  $("timelines-said").textContent = `The last ${WINDOW_MS / 1000} seconds: ${latest.running} running, ${latest.waiting} waiting`
    + (more > 0 ? `; of these, ${more} are not shown` : "") + `; ${ended.length} have ended since this page watches.`
    + (latest.clients_behind ? ` ${counted(latest.clients_behind, "client")} behind: ${kib(latest.unread_bytes)} of answers are not taken.` : "");
  tellSlowest();
  tellSteps();
  const used = latest.used_blocks, free = (about.blocks || 0) - used - latest.cached_blocks;
  $("kv-said").textContent = `${used} of ${about.blocks} blocks of ${about.block_size} tokens in use, ${latest.cached_blocks} cached, ${free} free.`;
  $("kv-legend").replaceChildren(legendEntry("var(--prefill-compute)", "of a request"), legendEntry("var(--decode-compute)", "of the next one"),
    legendEntry("var(--transport)", "of others"), legendEntry("var(--queue-policy)", "cached"), legendEntry("var(--line)", "free"));
  tellTables();
}

function tellSlowest() {
  const found = [];
  for (const [what, key, only] of [["time to first token", "ttft_ms", FIRST_TOKEN], ["whole request", "e2e_ms", null]]) {
    const known = ended.filter((each) => each[key] !== null).sort((a, b) => a[key] - b[key]);
    if (!known.length) continue;
    const slow = known.slice(-Math.ceil(known.length / 100)), half = known[known.length >> 1];
    for (const [words, some] of [[`P99, ${what}: ${ms(slow[0][key])}`, slow], [`median, ${what}: ${ms(half[key])}`, [half]]]) {
      const totals = {};
      for (const each of some)
        for (const [phase, length] of Object.entries(each.phases_ms))
          if (!only || only.includes(phase)) totals[phase] = (totals[phase] || 0) + length / some.length;
      const bar = element("div", "bar");
      bar.append(element("p", "", words), ...ledgerStrip(Object.entries(totals), words, 4));
      found.push([bar, totals]);
    }
  }
  $("slowest").replaceChildren(...found.map(([bar]) => bar));
  if (!found.length) return void ($("slowest-said").textContent = "No request has ended since this page watches.");
  const [phase] = Object.entries(found[0][1]).sort((a, b) => b[1] - a[1])[0] || ["receive"];
  $("slowest-said").textContent = `Of the last ${ended.length} requests. Most of the slowest first tokens is “${nameOf(phase)}”.`;
}

function tellSteps() {
  const judged = steps.filter((each) => each.predicted_ms && each.took_ms), last = steps[steps.length - 1];
  const legend = [legendEntry("var(--decode-compute)", "decoding"), legendEntry("var(--prefill-compute)", "prompts"), legendEntry("var(--ink)", "predicted")];
  const floors = steps.filter((each) => each.least_ms && each.took_ms);
  if (floors.length) legend.push(legendEntry("var(--lost)", "roofline"));
  $("steps-legend").replaceChildren(...legend);
  const parts = [];
  if (last) parts.push(`The last step took ${ms(last.took_ms)} for ${counted(last.decoding, "decoding token")} and ${counted(last.prompt_tokens, "prompt token")}.`);
  if (judged.length) {
    const errors = judged.map((each) => Math.abs(each.predicted_ms / each.took_ms - 1)).sort((a, b) => a - b);
    parts.push(`Half of the last ${judged.length} predictions were within ${share(quantile(errors, 0.5))} of the actual time.`);
  }
  if (floors.length) {
    const factors = floors.map((each) => each.took_ms / each.least_ms).sort((a, b) => a - b);
    parts.push(`Steps take ${quantile(factors, 0.5).toFixed(1)} times the roofline of their batch.`);
  } else if (!about.has_roofline) parts.push("The roofline is shown once “headway calibrate” has measured this machine.");
  $("steps-said").textContent = parts.join(" ") || "No step yet.";
}

function fillTable(id, lines) {
  $(id).tBodies[0].replaceChildren(...lines.map((cells) => {
    const line = element("tr");
    for (const [value, className] of cells) line.append(element("td", className || "", `${value}`));
    return line;
  }));
}

function tellTables() {
  const slackCell = (value) => (value === null ? ["–"] : [signed(value), value < 0 ? "late" : ""]);
  fillTable("now", latest.sequences.map((each) => [[each.id.slice(0, 8)], [each.service_class], [nameOf(each.phase)],
    [ms(latest.at_ms - each.arrived_ms)], [`${Math.min(each.computed, each.prompt_len)}/${each.prompt_len}`], [each.tokens], [each.blocks], slackCell(each.slack_ms)]));
  fillTable("classes", (about.classes || []).map((each) => {
    const mine = latest.sequences.filter((one) => one.service_class === each.name), slack = mine.map((one) => one.slack_ms).filter((one) => one !== null);
    const over = ended.filter((one) => one.service_class === each.name && one.met !== null);
    const asked = [["TTFT", each.ttft_ms], ["TPOT", each.tpot_ms], ["E2E", each.e2e_ms]].filter(([, value]) => value !== null).map(([name, value]) => `${name} ${ms(value)}`);
    return [[each.name], [asked.join(", ") || "none"], [latest.running_of_class[each.name] || 0], [latest.waiting_of_class[each.name] || 0],
      slackCell(slack.length ? Math.min(...slack) : null), [over.length ? `${share(over.filter((one) => one.met).length / over.length)} of ${over.length}` : "–"]];
  }));
}
const kib = (bytes) => `${Math.round(bytes / 1024)} KiB`;
const signed = (value) => (value < 0 ? `−${ms(-value)}` : ms(value));

function showLook() {
  tell();
  drawTimelines();
  drawSteps();
  drawBlocks();
}

// Timelines move smoothly, unless the reader wants less motion; then they move with each look.
const still = matchMedia("(prefers-reduced-motion: reduce)");
let drawn = 0;
function move(at) {
  requestAnimationFrame(move);
  if (paused || still.matches || !(watching || playing) || !latest || at - drawn < 60) return;
  drawn = at;
  drawTimelines();
}

$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", paused);
  $("pause").textContent = paused ? "Continue" : "Pause";
  say("live-said", paused ? "Paused" : playing ? "Recorded" : "Live");
  if (playing) playing.settle();
});
window.addEventListener("resize", () => latest && !$("live").hidden && showLook());
document.addEventListener("visibilitychange", () => {
  if (!model || playing || location.hash !== "#live") return;
  if (document.hidden) stopWatching();
  else watch();
});
requestAnimationFrame(move);
